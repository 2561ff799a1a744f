"""What the demo runs on: three prompts.

The prompts differ in how much of the answer is already in them, which is what n-gram drafting lives on.
"""

from dataclasses import dataclass

ARTICLE = """\
Cork is the outer bark of the cork oak, an evergreen tree of the western Mediterranean that grows above \
all in Portugal and Spain. Most trees die when their bark is taken off all around the trunk. The cork oak \
lives on, because only the dead outer layer is removed, and the living layer beneath it grows a new coat.

A cork oak is stripped for the first time when it is about twenty-five years old, and then again every \
nine to twelve years. The harvest takes place between May and August, when the tree is growing and the \
bark comes away easily. It is still done by hand: skilled workers cut the bark with an axe and lever it \
off in large planks, without wounding the tree. A digit painted on the trunk tells in which year it was \
last stripped. An oak can live for two hundred years and be harvested more than fifteen times.

The first harvest is hard and uneven, so it is ground up and pressed into flooring, insulation and shoe \
soles. Only from the third harvest on is the cork regular enough for the stoppers of wine bottles. What is \
left over after the stoppers have been punched out is ground up as well.

Cork is light, elastic and watertight because it consists of tiny closed cells filled with gas, about \
forty million in a cubic centimetre. It also burns badly, which protects the tree in forest fires. When \
Robert Hooke looked at a slice of cork through his microscope in 1665, the chambers that he saw gave the \
cell its name.
"""

CODE = '''\
import csv
from collections import defaultdict


def read_measurements(path):
    """Read pairs of station and temperature from a CSV file."""
    data = []
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            if row["temperature"]:
                data.append((row["station"], float(row["temperature"])))
    return data


def group_by_station(data):
    """Collect the temperatures of each station."""
    groups = defaultdict(list)
    for station, temperature in data:
        groups[station].append(temperature)
    return groups


def summarise(data):
    """Return the lowest, mean and highest temperature of each station."""
    summary = {}
    for station, temperatures in group_by_station(data).items():
        mean = sum(temperatures) / len(temperatures)
        summary[station] = (min(temperatures), mean, max(temperatures))
    return summary


def main():
    data = read_measurements("weather.csv")
    for station, (low, mean, high) in sorted(summarise(data).items()):
        print(f"{station}: {low:.1f} to {high:.1f}, mean {mean:.1f}")


if __name__ == "__main__":
    main()
'''


@dataclass(frozen=True)
class DemoPrompt:
    """One prompt.

    Attributes:
        name: what the table calls it.
        title: what is asked, in a line.
        content: the user's message.
    """

    name: str
    title: str
    content: str


PROMPTS = (
    DemoPrompt(
        name="question",
        title="Why is the sky blue during the day and red at sunset?",
        content="Why is the sky blue during the day and red at sunset?",
    ),
    DemoPrompt(
        name="summary",
        title="Summarize a text about cork.",
        content=f"Summarize this text, keeping the most important facts.\n\n{ARTICLE}",
    ),
    DemoPrompt(
        name="edit",
        title="Rename a function in a Python script.",
        content=f"Here is a Python script:\n\n```python\n{CODE}```\n\n"
        "Rename the function `summarise` to `summarize`. Write the complete script.",
    ),
)
