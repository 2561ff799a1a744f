"""Words that fill the templates."""

_TEXTS = {
    "topic": """
        climate change; the water cycle; black holes; artificial intelligence; democracy; friendship; the stock market;
        renewable energy; vaccines; the Roman Empire; the printing press; jazz; chess; public transport; sleep; honesty;
        online privacy; electric cars; the Renaissance; gravity; evolution; genetics; inflation; unemployment; free trade;
        gardening; meditation; the French Revolution; the Silk Road; ancient Egypt; the Olympic Games; social media;
        quantum mechanics; the periodic table; plate tectonics; volcanoes; earthquakes; coral reefs; rainforests; deserts;
        space travel; the Moon; Mars; satellites; the internet; encryption; machine learning; robots; 3D printing;
        poetry; theatre; film music; opera; photography; architecture; the Industrial Revolution; trade unions; taxes;
        human rights; freedom of speech; the separation of powers; elections; education; homework; school uniforms;
        remote work; time management; leadership; teamwork; small businesses; marketing; supply chains; globalization;
        organic farming; bees; ocean currents; the ozone layer; recycling; plastic waste; nuclear power; wind turbines;
        solar panels; batteries; bridges; railways; aviation; antibiotics; viruses; the immune system; the heart;
        the brain; memory; dreams; emotions; stress; exercise; vitamins; sugar; coffee; tea; wine; bread; cheese;
        mythology; philosophy; existentialism; stoicism; utilitarianism; free will; justice; beauty; happiness; courage;
        love; loneliness; patience; curiosity; language learning; translation; dictionaries; libraries; museums;
        the Cold War; the Second World War; the Middle Ages; the Vikings; pirates; castles; the Great Wall of China;
        prime numbers; probability; statistics; geometry; calculus; graph theory; logic; databases; operating systems;
        compilers; computer networks; open source software; video games; animation; fashion; tourism; festivals;
        football; basketball; tennis; swimming; marathon running; cycling; hiking; camping; cooking; baking; knitting
    """,
    "person": """
        a young doctor; an old sailor; a shy student; a retired teacher; a curious child; a famous singer; a baker;
        a detective; a tired nurse; a farmer; a lonely astronaut; a taxi driver; a librarian; a blind painter; a chess master;
        a lighthouse keeper; a new mother; a soldier; a scientist; a firefighter; a king without a country; a thief;
        a violin maker; a journalist; a gardener; a software engineer; a judge; a mountain guide; a fisherman; a dancer;
        a clockmaker; a robot; a ghost; a grandmother; a shopkeeper; a pilot; a carpenter; a poet; an inventor; a spy
    """,
    "object": """
        an old map; a silver key; a broken watch; a red bicycle; a wooden box; a camera; a guitar; a telescope; a lamp;
        a pair of boots; a letter without an address; a laptop; a smartphone; a kitchen knife; a blanket; a mirror;
        a backpack; a coffee machine; a notebook; a golden ring; an umbrella; a compass; a chess set; a radio; a kite;
        a vacuum cleaner; a tent; a used car; a sofa; a washing machine; a piano; a microscope; a water bottle; a drone
    """,
    "place": """
        a quiet village; a crowded market; an abandoned factory; a small island; a forest in winter; a train station;
        a hospital; a castle; a desert; a harbour; a library; an airport; a theatre; a mountain hut; a big city; a submarine;
        a space station; a museum at night; a school; a vineyard; a bridge; a lighthouse; a cave; a garden; a hotel
    """,
    "recipient": """
        your landlord; a colleague; the mayor; a customer; your manager; an old friend; a teacher; a neighbour; a supplier;
        the head of a school; a job applicant; a newspaper; an insurance company; a travel agency; your team
    """,
    "matter": """
        a delayed payment; a broken heating; a new project; an interview; a day off; a meeting next week; a noisy street;
        a lost parcel; a better price; a mistake in a report; a letter of recommendation; a change of plans; an apology;
        feedback on a draft; help with a move; a joint trip; a late delivery; a new idea for the product
    """,
    "occasion": """
        a wedding; a birthday; a graduation; a job interview; a retirement party; the opening of a shop; a school reunion;
        a marathon; an exam; a first day at work; a long flight; a conference; a housewarming; a village fair; New Year's Eve
    """,
    "country": """
        France; Germany; Italy; Spain; Portugal; Poland; Greece; Turkey; Egypt; Morocco; Kenya; Nigeria; South Africa; India;
        China; Japan; South Korea; Vietnam; Thailand; Indonesia; Australia; New Zealand; Canada; Mexico; Cuba; Brazil;
        Argentina; Chile; Peru; Colombia; Norway; Sweden; Finland; Denmark; Iceland; Ireland; Scotland; Austria; Switzerland;
        Hungary; Romania; Ukraine; Iran; Israel; Saudi Arabia; Pakistan; Nepal; Mongolia; the Philippines; the Netherlands
    """,
    "animal": """
        dolphin; elephant; wolf; owl; penguin; octopus; tiger; horse; honey bee; whale; fox; bear; eagle; salmon; camel;
        kangaroo; crocodile; hedgehog; parrot; spider; frog; giraffe; squirrel; bat; turtle; shark; ant; swan; goat; seal
    """,
    "problem": """
        air pollution; poverty; traffic jams; obesity; inflation; deforestation; unemployment; crime; drought; homelessness;
        burnout; illiteracy; food waste; overfishing; soil erosion; cyber attacks; bullying; debt; the loss of species
    """,
    "process": """
        photosynthesis; digestion; cell division; fermentation; erosion; combustion; evaporation; respiration; osmosis;
        nuclear fusion; electrolysis; the formation of stars; pollination; decomposition; blood clotting; DNA replication;
        glass making; steel production; cheese making; the birth of a law; a chemical titration; the orbit of a planet
    """,
    "historical": """
        Leonardo da Vinci; Cleopatra; Julius Caesar; Napoleon; Marie Curie; Albert Einstein; Isaac Newton; Charles Darwin;
        Galileo Galilei; Shakespeare; Beethoven; Mozart; Mahatma Gandhi; Abraham Lincoln; Nelson Mandela; Joan of Arc;
        Socrates; Aristotle; Confucius; Marco Polo; Christopher Columbus; Queen Victoria; Catherine the Great; Genghis Khan;
        Martin Luther; Vincent van Gogh; Frida Kahlo; Ada Lovelace; Alan Turing; Nikola Tesla; Thomas Edison; Louis Pasteur;
        Florence Nightingale; George Washington; Alexander the Great; Johannes Gutenberg; Simon Bolivar; Rosa Parks
    """,
    "subject": """
        biology; chemistry; physics; mathematics; economics; history; geography; psychology; sociology; computer science;
        medicine; law; engineering; linguistics; astronomy; political science; music; art history; statistics; ecology
    """,
    "activity": """
        playing the piano; public speaking; drawing; swimming; writing; chess; cooking; speaking Spanish; programming;
        photography; running; gardening; negotiating; saving money; singing; skiing; knitting; reading faster; debating
    """,
    "food": """
        pizza; bread; sushi; chocolate cake; tomato soup; pancakes; curry; apple pie; tacos; risotto; hummus; paella;
        dumplings; goulash; lasagne; ice cream; omelette; kimchi; falafel; ramen; lentil stew; scones; fish and chips
    """,
    "word": """
        serendipity; honest; brave; ancient; transparent; fragile; generous; ambiguous; resilient; obscure; candid; diligent;
        eloquent; frugal; inevitable; meticulous; nostalgia; paradox; sincere; tedious; vivid; zeal; empathy; irony
    """,
    "invention": """
        the telephone; the light bulb; the steam engine; the bicycle; the airplane; the computer; the microscope; paper;
        the compass; the refrigerator; the radio; television; the battery; penicillin; the zipper; the printing press;
        dynamite; the sewing machine; the electric motor; the camera; the thermometer; the barometer; the typewriter
    """,
    "chemical": """
        water; table salt; carbon dioxide; ammonia; methane; sulfuric acid; glucose; ethanol; ozone; hydrogen peroxide;
        baking soda; quartz; rust; aspirin; vinegar; caffeine; chlorine; iron; copper; helium; limestone
    """,
    "name": """
        Anna; Ben; Clara; David; Emma; Felix; Grace; Henry; Ida; Jack; Kate; Liam; Maria; Noah; Olivia; Paul; Rosa; Sam;
        Tina; Victor; Wendy; Omar; Priya; Chen; Yuki; Carlos; Fatima; Lena; Marco; Nadia; Oscar; Peter; Ruth; Simon; Zoe
    """,
    "thing": """
        apples; marbles; books; pencils; stickers; tickets; cups; shirts; coins; oranges; cards; boxes; balloons; eggs;
        bottles; flowers; candles; bricks; stamps; shells; toys; cookies; sandwiches; lamps; chairs; tomatoes; roses
    """,
    "language": "Python; Python; Python; JavaScript; Java; C++; C; Go; Rust; TypeScript; Ruby; Bash",
    "task": """
        reverses a string; checks whether a number is prime; sorts a list of numbers; counts the words in a file;
        computes the factorial of n; finds the largest number in a list; merges two sorted lists; removes duplicates;
        finds the longest common prefix of strings; converts Celsius to Fahrenheit; prints a multiplication table;
        checks whether a word is a palindrome; computes Fibonacci numbers; parses a CSV file; reads JSON from a file;
        finds all permutations of a string; implements binary search; implements a stack; implements a queue;
        builds a binary search tree; finds the shortest path in a graph; counts vowels in a text; generates a random password;
        validates an email address; downloads a web page; computes the greatest common divisor; transposes a matrix;
        multiplies two matrices; finds two numbers that add up to a target; rotates an array; groups anagrams;
        computes compound interest; draws a triangle of stars; simulates a dice game; keeps a to-do list; logs errors;
        finds the median of two arrays; balances parentheses; converts Roman numerals; finds missing numbers;
        computes the edit distance of two strings; schedules tasks by priority; caches results of a function
    """,
}

LISTS = {name: [" ".join(word.split()) for word in text.split(";")] for name, text in _TEXTS.items()}
