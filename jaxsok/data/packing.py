"""Packs batches in the threads or worker processes of Grain."""

from collections.abc import Mapping
from typing import Any

import grain

from jaxsok.collection import Collection
from jaxsok.pack import HostBatch, PadTo


class PackBatch(grain.transforms.Map):
    """A transformation for Grain that packs raw batches for a collection, in whatever process it runs.

    `collection.batch` and `collection.pipeline` take what it makes as a raw batch; the copy to the devices is left to
    them. A batch that only NumPy can pack (such as features whose samples share bags) passes as arrays.

    `collection.pipeline` packs with several threads anyhow, straight into pinned memory; packing in worker processes
    pays where they do other work too, which holds Python's lock.

    Args:
      collection: for whose devices in this process batches are packed.
      pad_to: that of `collection.batch`; give both the same.

    Example:
      >>> import jaxsok, numpy as np
      >>> from jaxsok.data import ArraySource, Batches, iterate
      >>> collection = jaxsok.Collection(
      ...     [jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(0.1))], [jaxsok.FeatureSpec("user", table="user")]
      ... )
      >>> batches = Batches(ArraySource({"user": np.arange(8)}), 4, process_index=0, process_count=1)
      >>> for batch, plan in collection.pipeline(iterate(batches.map(PackBatch(collection)))):
      ...     print(batch.features)
      Features(user: 4 keys -> [4, dim])
      Features(user: 4 keys -> [4, dim])
    """

    def __init__(self, collection: Collection, *, pad_to: PadTo = None):
        self._packer, self._pad_to = collection.packer.for_workers(), pad_to

    def map(self, raw: Mapping[str, Any]) -> HostBatch | Mapping[str, Any]:
        """Packs a raw batch; errors are those of `collection.batch`, but are left to it where data are refused."""
        is_split = self._packer.is_split
        begun = self._packer.start(raw, self._packer.resolve(raw, self._pad_to, is_split), is_split)
        return begun.wait() or begun.raw
