"""`python -m bench.throughput`: whole generations, ours against others, interleaved prompt by prompt.

The modules, from the ground up: `prompts`, `presets`, `options`, `command_line`; `methods` (what every contender is),
`shared_models`, `synthetic`, `forwards`, `ours`, `transformers_methods` and `other_engines` (the contenders), `plan` (who meets
whom); `records` (what is kept), `match` and `run` (the loop); `summary`, `theory`, `table`,
`plots` and `report`.
"""
