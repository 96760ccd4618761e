"""Flax layers: sugar over `Collection.lookup` and `Collection.update`.

`jaxsok.layers.nnx` and `jaxsok.layers.linen` are imported by the user, each with its half of Flax; `import jaxsok`
needs neither. What both share is in tap.py.
"""
