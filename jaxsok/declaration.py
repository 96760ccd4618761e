"""Checks of the stores that a collection declares; specs.py checks what they are made of."""

from collections.abc import Sequence

from jaxsok.specs import ExchangeSpec, FeatureSpec, StoreSpec
from jaxsok.types import MAX_CAPACITY, MAX_FEATURES, MAX_SLOTS


def check_stores(
    op: str, stores: Sequence[StoreSpec], features: Sequence[FeatureSpec], exchange: ExchangeSpec, num_shards: int
) -> None:
    """Refuses stores with more rows, features, or tables for one round of the exchange, than there may be."""
    for s, store in enumerate(stores):
        names = [table.name for table in store.tables]
        least = exchange.send_capacity
        if least is not None and num_shards > 1 and least < len(names):
            raise ValueError(
                f"{op}: exchange: send_capacity: got {least}, wanted at least {len(names)}, the tables of "
                f"store {s}: so many keys may share a hash, and go in one round."
            )
        num_features = sum(feature.table in names for feature in features)
        if num_features > MAX_FEATURES:
            raise ValueError(
                f"{op}: features: got {num_features} over the store of tables {names}, wanted at most "
                f"{MAX_FEATURES}; use two collections."
            )
        if store.sends_bags and num_shards > MAX_FEATURES:
            raise ValueError(
                f'{op}: features: got exchange="bags" of tables {names} on {num_shards} shards, wanted "rows" on '
                f"more than {MAX_FEATURES}."
            )
        if store.memory is not None and store.num_slots > MAX_SLOTS:
            raise ValueError(
                f"{op}: tables {names}: memory: got {store.memory}, {store.num_slots} rows for a device, wanted "
                f"at most {MAX_SLOTS}."
            )
        if store.capacity > MAX_CAPACITY:
            raise ValueError(
                f"{op}: tables {names}: capacity: got {store.capacity} rows of a shard in store {s}, wanted at "
                f"most {MAX_CAPACITY}; use more shards."
            )
