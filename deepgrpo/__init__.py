"""DEEP-GRPO in JAX: GRPO whose batches are topped up with hard states.

Letters used everywhere, and never for anything else:
`B` packed rows, `T` tokens in a row, `S` segments (in attention: key positions), `G` responses a prompt, `L` layers,
`D` width, `N` query heads, `K` key-value heads, `H` head size, `F` mlp width, `V` vocabulary.
"""

__version__ = "0.1.0"
