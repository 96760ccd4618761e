"""Training data from files: sources of samples, read in batches by Grain, and packed for a collection.

Needs the extra `data` (Grain and PyArrow). A source reads samples at any place; `Batches` says which of them make a
batch, on any number of processes; `iterate` reads ahead, and its state can be saved. `criteo` reads Criteo's logs.
"""

from jaxsok.data import criteo
from jaxsok.data.batches import Batches, PackBatch, iterate
from jaxsok.data.samples import ArraySource, ArrowSource, BlockSource, JoinedSource, Source

__all__ = [
    "ArraySource",
    "ArrowSource",
    "Batches",
    "BlockSource",
    "JoinedSource",
    "PackBatch",
    "Source",
    "criteo",
    "iterate",
]
