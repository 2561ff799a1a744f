"""Longer texts, put together from parts: records to extract from, German to translate, reports to summarise."""

import random

from .words import LISTS

EXTRACTION_TASKS = [
    "Extract the names and the amounts from the following lines, as JSON.",
    "Read the notes below and make a table with the columns name, country and amount.",
    "Which of these people spent most? List them from the largest amount to the smallest.",
    "Put the following lines into categories and explain your choice.",
    "Find all dates in the following text and write them as YYYY-MM-DD, one per line.",
    "Turn these notes into a CSV file with a header.",
    "For each of the following lines, say in one word whether its tone is positive, neutral or negative.",
]
TRANSLATION_TASKS = [
    "Translate German to English:", "Translate into English:", "Translate the following German text to English:",
    "What does this mean in English?",
]  # fmt: skip
SUMMARY_TASKS = [
    "Summarize:", "Summarize the following article:", "Summarize this text in three sentences:", "Give a short summary:",
    "What are the main points of this article?",
]  # fmt: skip

MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
CITIES = [
    "Hamburg",
    "Lyon",
    "Leeds",
    "Porto",
    "Turin",
    "Gdansk",
    "Bergen",
    "Malmo",
    "Cork",
    "Ghent",
    "Graz",
    "Seville",
    "Boston",
    "Denver",
    "Austin",
    "Seattle",
    "Toronto",
    "Perth",
    "Osaka",
    "Busan",
    "Hanoi",
    "Lima",
    "Bogota",
    "Nairobi",
    "Lagos",
    "Cairo",
    "Izmir",
    "Odessa",
    "Riga",
    "Vilnius",
]
SURNAMES = [
    "Miller",
    "Novak",
    "Garcia",
    "Olsen",
    "Tanaka",
    "Dubois",
    "Rossi",
    "Okafor",
    "Schmidt",
    "Kowalski",
    "Haddad",
    "Patel",
    "Nguyen",
    "Silva",
    "Murphy",
    "Larsen",
    "Fischer",
    "Moreau",
    "Costa",
    "Andersson",
    "Kim",
    "Lopez",
    "Weber",
    "Walker",
    "Young",
    "Hughes",
    "Carter",
    "Bauer",
]


def pick(rng: random.Random, name: str) -> str:
    return rng.choice(LISTS[name])


def person(rng: random.Random) -> str:
    return f"{pick(rng, 'name')} {rng.choice(SURNAMES)}"


def date(rng: random.Random) -> str:
    return f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.randint(1950, 2023)}"


def record(rng: random.Random) -> str:
    """A line of notes about someone."""
    return rng.choice([
        f"{person(rng)} from {pick(rng, 'country')} paid ${rng.randint(5, 900)} for {pick(rng, 'object')} on {date(rng)}.",
        f"On {date(rng)} we sent {rng.randint(2, 90)} {pick(rng, 'thing')} to {person(rng)}, {rng.choice(CITIES)}.",
        f"{person(rng)} wrote: {pick(rng, 'object')} arrived late, and I was {rng.choice(['angry', 'pleased', 'surprised'])}.",
        f"Invoice {rng.randint(1000, 9999)}: {person(rng)}, {rng.randint(1, 9)} x {pick(rng, 'thing')}, ${rng.randint(10, 500)}.",
        f"{person(rng)} ({rng.randint(18, 80)}) works in {pick(rng, 'subject')} and earns ${rng.randint(20, 120)},000 a year.",
    ])  # fmt: skip


GERMAN_SUBJECTS = [
    "Der Bürgermeister",
    "Die Polizei",
    "Mein Bruder",
    "Die alte Frau",
    "Der junge Lehrer",
    "Ein Sprecher der Firma",
    "Die Regierung",
    "Das Museum",
    "Der Verein",
    "Die Stadt",
    "Unsere Nachbarin",
    "Der Trainer",
    "Die Ärztin",
    "Ein Zeuge",
    "Die Schule",
    "Der Minister",
    "Die Forscher der Universität",
    "Das Gericht",
    "Der Künstler",
    "Die Feuerwehr",
]
GERMAN_TIMES = [
    "gestern",
    "am Montag",
    "im vergangenen Jahr",
    "heute Morgen",
    "seit drei Wochen",
    "nach der Sitzung",
    "im Sommer",
    "vor zehn Jahren",
    "am Wochenende",
    "trotz des Regens",
    "kurz nach Mitternacht",
    "zum ersten Mal",
    "in diesem Herbst",
]
GERMAN_VERBS = [
    ("hat", "einen neuen Plan vorgestellt"), ("hat", "über die Kosten des Projekts gesprochen"),
    ("hat", "zwei Männer auf dem Bahnhof gesehen"), ("hat", "das Spiel mit drei zu eins gewonnen"),
    ("hat", "ein Buch über die Geschichte der Brücke geschrieben"), ("ist", "mit dem Zug nach Berlin gefahren"),
    ("hat", "die Straße bis zum Abend gesperrt"), ("will", "mehr Geld für die Kinder ausgeben"),
    ("hat", "den Vertrag mit dem Unternehmen beendet"), ("sucht", "noch immer nach dem Besitzer des Hundes"),
    ("hat", "die Ausstellung mit vierzig Bildern eröffnet"), ("muss", "wegen der Krankheit zu Hause bleiben"),
    ("hat", "eine Lösung für das Problem gefunden"), ("konnte", "das Feuer schnell löschen"),
    ("hat", "die Ergebnisse der Untersuchung veröffentlicht"), ("freut", "sich auf viele Besucher aus dem Ausland"),
    ("hat", "das alte Haus am Fluss gekauft"), ("wird", "im nächsten Monat nach Italien reisen"),
]  # fmt: skip
GERMAN_ENDS = [
    "",
    ", sagte er der Zeitung",
    ", wie der Sender berichtet",
    ", obwohl niemand damit gerechnet hatte",
    ", weil das Wetter so gut war",
    ", und alle waren zufrieden",
    ", aber es gibt noch viele Fragen",
    ", damit die Arbeit leichter wird",
]


def german(rng: random.Random) -> str:
    """A sentence."""
    subject, (auxiliary, rest) = rng.choice(GERMAN_SUBJECTS), rng.choice(GERMAN_VERBS)
    time = rng.choice(GERMAN_TIMES)
    end = rng.choice(GERMAN_ENDS)
    if rng.random() < 0.5:
        return f"{subject} {auxiliary} {time} {rest}{end}."
    low = subject[0].lower() + subject[1:]
    return f"{time[0].upper()}{time[1:]} {auxiliary} {low} {rest}{end}."


def report(rng: random.Random, sentences: int) -> str:
    """A news report about an event in a town."""
    town, who, other = rng.choice(CITIES), person(rng), person(rng)
    what = rng.choice([
        "a fire in a warehouse", "the opening of a new bridge", "a strike of bus drivers", "the rescue of two hikers",
        "a record harvest", "the sale of the football club", "a power cut", "the discovery of an old ship",
        "a plan for a new school", "a flood in the old town", "the trial of a former manager", "a lost dog that came back",
    ])  # fmt: skip
    trade, topic, thing = pick(rng, "person"), pick(rng, "topic"), pick(rng, "thing")
    first = f"{town} is talking about {what} since {date(rng)}, when {who}, {trade}, called the local newspaper."
    others = [
        f"'{rng.choice(['I could not believe my eyes', 'Nobody had told us', 'We were lucky', 'It was a long night'])},' said {who}.",
        f"According to {other}, who speaks for the city, the costs are about ${rng.randint(2, 90)} million.",
        f"At least {rng.randint(3, 400)} people were in the area at that time, among them {rng.randint(2, 30)} children.",
        f"The case has started a debate about {topic} in the whole country.",
        f"{other} asked everyone to stay calm and to wait for the results, which are expected in {rng.choice(MONTHS)}.",
        f"Neighbours brought {thing}, blankets and hot soup.",
        f"It is not the first time: in {rng.randint(1950, 2015)} something similar happened in {rng.choice(CITIES)}.",
        f"Experts from {pick(rng, 'country')} have offered their help.",
        f"{who} has lived in {town} for {rng.randint(3, 50)} years and knows every street.",
        f"The police are looking for witnesses who saw {pick(rng, 'object')} near the station.",
        f"A spokeswoman of the university said that {pick(rng, 'subject')} students had warned of this for years.",
        f"The mayor promised {rng.randint(10, 95)} new jobs and a report within {rng.randint(2, 12)} weeks.",
        f"On social media more than {rng.randint(2, 90)},000 people have shared a picture of {pick(rng, 'object')}.",
        f"'{rng.choice(['We will rebuild', 'This must not happen again', 'I am proud of this town'])},' {other} told reporters on {rng.choice(['Monday', 'Tuesday', 'Friday', 'Sunday'])}.",
        f"Trains between {town} and {rng.choice(CITIES)} were late by up to {rng.randint(20, 180)} minutes.",
        f"{rng.choice(CITIES)} and {rng.choice(CITIES)} have similar plans, but no money for them.",
        f"{trade[0].upper()}{trade[1:]} by profession, {pick(rng, 'name')} {who.split()[1]} had never spoken in public before.",
        f"The insurance company will pay for {rng.randint(20, 90)} percent of the damage, {other} said.",
        f"Whether {topic} had anything to do with it is an open question.",
    ]  # fmt: skip
    return " ".join([first, *rng.sample(others, min(sentences, len(others)))])


def with_question(rng: random.Random) -> tuple[str, str]:
    """A passage like those of an encyclopedia, and a question that it answers."""
    who, town, country = person(rng), rng.choice(CITIES), pick(rng, "country")
    born, invention, subject = rng.randint(1780, 1960), pick(rng, "invention"), pick(rng, "subject")
    other, prize = person(rng), rng.randint(born + 30, born + 60)
    facts = [
        (f"{who} (born {date(rng).rsplit(' ', 1)[0]} {born} in {town}) was known for work on {invention}.", f"Where was {who} born?"),
        (f"After studying {subject} in {rng.choice(CITIES)}, {who.split()[1]} moved to {country}.", f"What did {who} study?"),
        (f"In {born + 27} {who.split()[1]} married {other}, with whom {rng.randint(2, 6)} children were raised.", f"Who was married to {who}?"),
        (f"The first book, about {pick(rng, 'topic')}, appeared in {born + 33} and sold {rng.randint(2, 90)},000 copies.", f"When did the first book of {who} appear?"),
        (f"In {prize} the academy of {pick(rng, 'country')} gave {who.split()[1]} its highest prize.", f"In which year did {who} get a prize?"),
        (f"A street in {rng.choice(CITIES)} and a school in {town} carry the name {who.split()[1]}.", f"What is named after {who}?"),
        (f"{who.split()[1]} also played {rng.choice(['the violin', 'chess', 'football', 'the organ'])} and collected {pick(rng, 'thing')}.", f"What did {who} collect?"),
        (f"{who.split()[1]} died in {rng.choice(CITIES)} at the age of {rng.randint(61, 95)}.", f"Where did {who} die?"),
        (f"Later {other} called the work on {invention} the most important of its time.", f"What did {other} think of the work?"),
    ]  # fmt: skip
    chosen = sorted(rng.sample(range(len(facts)), rng.randint(5, len(facts))))
    return " ".join(facts[i][0] for i in chosen), facts[rng.choice(chosen)][1]
