"""`python -m bench.throughput`: whole generations, ours against others, interleaved prompt by prompt.

The rooms, from the ground up: `prompts`, `presets`, `options`, `command_line`; `methods` (what every contender is), `bed`
(the models), `synthetic`, `forwards`, `ours`, `hf` and `others` (the contenders), `plan` (who meets whom); `compare` (where
two texts part), `records` (what is kept), `match` and `run` (the loop); `summary`, `theory`, `table`, `plots` and `report`.
"""
