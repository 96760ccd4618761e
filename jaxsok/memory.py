"""Counts the bytes that a collection takes on each device, for its state and for one step.

It computes with specs, sizes of batches and the kernels' own workspace sizes. The state is counted to the byte. For a
step it gives a bound: batch, plan, embeddings and gradients count as if all lived at once, and of the workspaces the
largest one counts, since calls follow one another. The model's own activations are not counted.

On a mesh of S shards a device receives S * send_capacity lines in a round. The exchange is counted as two float32 rows
a line (sent and received, or received and decoded, whatever the dtype on the wire), one a key (rows that came back,
sums of gradients), requests of 16 bytes sent and received, and 32 bytes a line for row ids and uses. With the window
wire they are windows, outside of the memory that XLA gives to arrays: mostly one of a row a line; after growth in small
steps, with those that came before, at most four. Batches and plans are counted as `collection.pipeline` holds them:
plans of three batches (calls, where a call has several steps) behind the one in use and those looked up ahead, and two
more batches that are packed.

For rows in host memory a device has places, homes and a cache, and a step stages a row with its optimizer state for
each key beyond the slots of the cache. Their bytes in host memory are counted apart, for each device.
"""

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxsok import checks, declaration, raw_features, specs as specs_lib
from jaxsok.checks import not_none
from jaxsok.enlarge import next_capacity
from jaxsok.exchange import default_send_capacity
from jaxsok.features import StoreFeatures
from jaxsok.growth import keys_at_most
from jaxsok.kernels import library
from jaxsok.pipeline import JOINED_AHEAD, PACKED_AHEAD
from jaxsok.planner import REQUEST_BYTES, keys_of
from jaxsok.printed import format_bytes, format_columns, name_devices
from jaxsok.specs import ExchangeSpec, FeatureSpec, StoreSpec, TableSpec, bag_tables, group_into_stores
from jaxsok.store import host_row_bytes, num_buckets_of, row_bytes, staged_bytes, store_bytes
from jaxsok.tickets import NUM_LINES
from jaxsok.types import COUNTS, ENTRIES_PER_BUCKET, MAX_CAPACITY, MAX_ROWS, NUM_PARTITIONS

MEMORY_FRACTION = 0.75  # XLA's default share of a GPU, see XLA_CLIENT_MEM_FRACTION

STATE = ("rows", "optimizer_state", "places", "cache", "records", "statistics", "index", "counters", "admission")
STEP = ("batch", "plan", "embeddings", "gradients", "exchange", "staged", "workspace")


@dataclasses.dataclass(frozen=True)
class StoreMemory:
    """The bytes of one store on one device."""

    tables: tuple[str, ...]
    dim: int
    num_rows: int
    """Rows in use, of all tables, on all devices."""
    capacity: int
    """Rows of a shard."""
    load: float
    """Load of the index when `num_rows` are in use."""
    row_bytes: int
    """Bytes of one row of capacity: its numbers, optimizer state, record, and share of the index."""
    state: Mapping[str, int]
    """Bytes of the arrays: "rows", "optimizer_state", "records", "index", "counters", and where there are any
    "statistics" and "admission". Of rows in host memory "places" (and homes) and "cache" in place of the first two."""
    reserve: int
    """The part of these bytes that `grow` keeps free for the keys of coming steps."""
    num_keys: int
    """Positions for keys in one batch of a device."""
    step: Mapping[str, int]
    """Bytes that a step adds: "batch" and "plan" (of all batches under way), "embeddings", "gradients", "exchange" (0
    on one device), "staged" (0 where rows lie on the device), "workspace" (the largest of lookup, plan and update)."""
    host_bytes: int = 0
    """Bytes of rows and optimizer state in host memory, for a device."""


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on each device. `str` makes a table of it."""

    stores: tuple[StoreMemory, ...]
    num_shards: int
    other: int
    """Bytes of step, seed, lineage, owners of partitions, tickets and counts of refused keys."""
    tables: tuple[TableSpec, ...]
    _specs: tuple[StoreSpec, ...]
    device_bytes: int | None = None
    """Bytes of one device, as asked."""
    memory_fraction: float = MEMORY_FRACTION
    """The part of these that XLA gives to arrays."""

    @property
    def state_bytes(self) -> int:
        """Bytes of all arrays of the state."""
        return self.other + sum(sum(store.state.values()) for store in self.stores)

    @property
    def host_bytes(self) -> int:
        """Bytes of rows in host memory, for a device: a host with several devices needs so much for each."""
        return sum(store.host_bytes for store in self.stores)

    @property
    def step_bytes(self) -> int:
        """Bytes that a step adds to the state, at most, without the model's own."""
        workspace = max((store.step["workspace"] for store in self.stores), default=0)
        return workspace + sum(sum(store.step.values()) - store.step["workspace"] for store in self.stores)

    @property
    def total(self) -> int:
        """Bytes of state and step."""
        return self.state_bytes + self.step_bytes

    @property
    def bytes_per_key(self) -> float:
        """Bytes of the state, on all devices together, over the rows in use."""
        return self.state_bytes * self.num_shards / max(1, sum(store.num_rows for store in self.stores))

    @property
    def memory_bytes(self) -> int | None:
        """Bytes that XLA gives to arrays on a device; None: not asked."""
        return None if self.device_bytes is None else int(self.device_bytes * self.memory_fraction)

    def largest_capacities(self, memory_bytes: int | None = None) -> dict[str, int]:
        """Computes the capacities, in the proportions of the specs, with which state and step just fit.

        The step counted is that of the declared capacities: one with a smaller cache stages more rows.

        No table gets more than its `max_capacity`; the others then get more. `memory_bytes` are those for arrays on
        each device; None: `device_bytes * memory_fraction`. The result has rows by table, on all devices together, for
        `TableSpec(capacity=...)`: all 0 if the step alone is too large.

        Example:
          >>> from jaxsok import optim
          >>> estimate = memory_estimate([TableSpec("user", 64, optim.rowwise_adagrad(0.1))])
          >>> estimate.largest_capacities(int(0.8 * 141e9))
          {'user': 366233759}
        """
        limit = self.memory_bytes if memory_bytes is None else memory_bytes
        if limit is None:
            raise ValueError(
                "largest_capacities: memory_bytes: got None without device_bytes, wanted the bytes that a device has "
                "for arrays."
            )
        room = limit - self.other - self.step_bytes
        stores = self._specs
        declared = sum(table.capacity for table in self.tables)

        def scale(tables: Sequence[TableSpec], num_rows: int) -> list[int]:
            rows = [(num_rows * table.capacity // declared, table.max_capacity) for table in tables]
            return [min(number, limit or number) for number, limit in rows]

        def fits(num_rows: int) -> bool:
            pairs = [(spec, scale(spec.tables, num_rows)) for spec in stores]
            if max(spec.rows_of_shard(rows) for spec, rows in pairs) > MAX_CAPACITY:
                return False
            counted = [store_bytes(_with_capacities(spec, rows), spec.rows_of_shard(rows)) for spec, rows in pairs]
            return sum(sum(sizes.values()) for sizes in counted) <= room

        # A row takes more than a byte. All tables but one with a small share may be at their max_capacity.
        low, high = 0, max(room, 0) * self.num_shards * declared
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return {table.name: rows for table, rows in zip(self.tables, scale(self.tables, low), strict=True)}

    def __str__(self) -> str:
        names = [" ".join(store.tables) for store in self.stores]
        parts = [part for part in STATE if any(part in store.state for store in self.stores)]
        capacity = "capacity" if self.num_shards == 1 else "capacity of each"  # rows in use are those of all devices
        head = ("state", "dim", "rows in use", capacity, *(name.replace("_", " ") for name in parts), "a row")
        body = [
            (
                name,
                str(store.dim),
                f"{store.num_rows:,}",
                f"{store.capacity:,}",
                *(format_bytes(store.state.get(part, 0)) for part in parts),
                f"{store.row_bytes} B",
            )
            for name, store in zip(names, self.stores, strict=True)
        ]
        lines = format_columns(head, body, is_text=(0,))
        if any(store.num_keys for store in self.stores):
            parts = [part for part in STEP if part != "staged" or self.host_bytes]
            head = ("step", "keys", *parts, "reserve")
            body = [
                (
                    name,
                    f"{store.num_keys:,}",
                    *(format_bytes(store.step[part]) for part in parts),
                    format_bytes(store.reserve),
                )
                for name, store in zip(names, self.stores, strict=True)
            ]
            lines += ["", *format_columns(head, body, is_text=(0,))]
        each = name_devices(self.num_shards)
        lines += [
            "",
            f"{format_bytes(self.total)} on {each}: state {format_bytes(self.state_bytes)}, step "
            f"{format_bytes(self.step_bytes)}. {self.bytes_per_key:.1f} bytes a key.",
        ]
        if self.host_bytes:
            lines.append(f"{format_bytes(self.host_bytes)} of host memory for {each}.")
        if self.device_bytes is not None and self.memory_bytes is not None:
            verdict = "enough" if self.total <= self.memory_bytes else "too little"
            largest, most = self.largest_capacities(), {table.name: table.max_capacity for table in self.tables}
            rows = ", ".join(
                f"{name} {number:,}{' (its max_capacity)' if number == most[name] else ''}"
                for name, number in largest.items()
            )
            fraction = math.ceil(100 * self.total / self.device_bytes) / 100
            wanted = f"must be at least {fraction:.2f}" if fraction < 1 else "cannot be large enough"
            lines += [
                f"XLA gives arrays {format_bytes(self.memory_bytes)}, {self.memory_fraction:.0%} of "
                f"{format_bytes(self.device_bytes)}: {verdict}; XLA_CLIENT_MEM_FRACTION {wanted}.",
                f"Rows that would fit: {rows}.",
            ]
        return "\n".join(lines)


def _with_capacities(spec: StoreSpec, capacities: Sequence[int]) -> StoreSpec:
    """Declares a store's tables with other capacities, of which its cache may be a share."""
    if spec.memory is None:
        return spec
    pairs = zip(spec.tables, capacities, strict=True)
    tables = tuple(dataclasses.replace(table, capacity=min(max(1, rows), MAX_ROWS)) for table, rows in pairs)
    return dataclasses.replace(spec, tables=tables)


def memory_estimate(
    tables: Sequence[TableSpec],
    features: Sequence[FeatureSpec] = (),
    *,
    num_shards: int = 1,
    num_rows: int | Mapping[str, int] | None = None,
    num_samples: int | None = None,
    keys_per_step: int | Mapping[str, int] | None = None,
    exchange: ExchangeSpec | None = None,
    steps: int = 1,
    lookahead: int = 0,
    steps_per_call: int = 1,
    device_bytes: int | None = None,
    memory_fraction: float = MEMORY_FRACTION,
) -> MemoryEstimate:
    """Counts the bytes that a collection takes on each device, before there is one; `print` the estimate.

    Args:
      tables: of the collection to be.
      features: of the collection to be; only what a step needs depends on them.
      num_shards: devices along its axis.
      num_rows: rows that the tables will come to have, on all devices together, by table or one number for each. The
        capacity counted is the one that `grow` reaches by doubling the declared one. None: the declared capacity, full.
      num_samples: of one device's part of a batch. Without it and `keys_per_step` the state alone is counted.
      keys_per_step: positions for keys, with padding, that one device's part of a batch has for each feature, or one
        number for all. A feature without one has `max_keys` shared out, else one key (or `max_hotness`) a sample.
      exchange: as the collection gets it: its send capacity, and its wire; "auto" counts as "window", which needs more.
      steps: between two calls of `grow`: so much is held in reserve.
      lookahead: batches that are looked up ahead (`Collection.pipeline`): of each the batch, its plan, and embeddings,
        which only stale lookups hold.
      steps_per_call: that of `Collection.pipeline`: so many batches are stacked, on a mesh with their plans.
      device_bytes: memory of one device: whether the total fits, and how many rows would.
      memory_fraction: the part of `device_bytes` that XLA gives to arrays: XLA_CLIENT_MEM_FRACTION, by default 0.75.

    Raises:
      TypeError, ValueError: unknown names, invalid numbers, a feature without a number of keys.
      ImportError: the CPU library, which knows the sizes of workspaces, is missing.

    Example:
      >>> from jaxsok import optim
      >>> tables = [TableSpec("user", 64, optim.rowwise_adagrad(0.1), capacity=1_000_000)]
      >>> estimate = memory_estimate(tables, [FeatureSpec("user", table="user")], num_samples=65_536)
      >>> estimate.stores[0].row_bytes, estimate.stores[0].state["index"], estimate.stores[0].step["embeddings"]
      (308, 32000000, 16777216)
    """
    op = "memory_estimate"
    specs_lib.check_declarations(op, tables, features, num_shards, exchange)
    stores = group_into_stores(tables, int(num_shards), bag_tables(features))
    declaration.check_stores(op, stores, features, exchange or ExchangeSpec(), int(num_shards))
    sizes = _sizes(features, num_samples, keys_per_step, num_shards)
    parts = [raw_features.shapes_of(store, features if sizes else (), sizes) for store in stores]
    device = {"device_bytes": device_bytes, "memory_fraction": memory_fraction}
    pipeline = {"lookahead": lookahead, "steps_per_call": steps_per_call}
    return estimate(tables, stores, parts, None, num_rows, exchange, steps=steps, **pipeline, **device)


def estimate(
    tables: Sequence[TableSpec],
    stores: Sequence[StoreSpec],
    features: Sequence[StoreFeatures],
    known: Sequence[tuple[int, int]] | None,
    num_rows: int | Mapping[str, int] | None,
    exchange: ExchangeSpec | None,
    steps: int,
    lookahead: int,
    steps_per_call: int,
    device_bytes: int | None,
    memory_fraction: float,
) -> MemoryEstimate:
    """Does `memory_estimate` for features of one device by store.

    `known`: the rows of a shard of each store, and the bytes of its keys that wait for admission, of a state.
    """
    op = "memory_estimate"
    checks.integer(f"{op}: steps", steps, 1)
    checks.integer(f"{op}: lookahead", lookahead, 0)
    checks.integer(f"{op}: steps_per_call", steps_per_call, 1)
    if device_bytes is not None:
        checks.number(f"{op}: device_bytes", device_bytes, checks.ABOVE_ZERO, math.inf, "a number of bytes, above 0")
    checks.number(f"{op}: memory_fraction", memory_fraction, checks.ABOVE_ZERO, 1, "a number above 0, at most 1")
    rows = _rows_of(tables, num_rows)
    by_name = {table.name: number for table, number in zip(tables, rows, strict=True)}
    num_shards = stores[0].num_shards
    counted = []
    for s, (spec, part) in enumerate(zip(stores, features, strict=True)):
        reserved = max(steps, steps_per_call) * keys_at_most(
            spec, [(layout.table, layout.num_keys) for layout in part.layouts]
        )
        of_tables = [by_name[table.name] for table in spec.tables]
        sightings_bytes = None
        if known is not None:
            capacity, sightings_bytes = known[s]
        else:
            capacity = spec.capacity if num_rows is None else _grow_to(spec, reserved, spec.rows_of_shard(of_tables))
        in_use, limits = sum(of_tables), [table.max_capacity for table in spec.tables]
        if known is None and None not in limits:
            in_use = min(in_use, sum(limits))  # the store's: its tables pool their rows
        of_shard = in_use if spec.is_replicated else in_use / num_shards
        counted.append(
            StoreMemory(
                tables=tuple(table.name for table in spec.tables),
                dim=spec.dim,
                num_rows=in_use,
                capacity=capacity,
                load=of_shard / (ENTRIES_PER_BUCKET * num_buckets_of(capacity)),
                row_bytes=row_bytes(spec),
                state=store_bytes(spec, capacity, sightings_bytes),
                reserve=min(reserved, capacity) * row_bytes(spec),
                num_keys=sum(layout.num_keys for layout in part.layouts),
                step=_step_bytes(spec, part, exchange or ExchangeSpec(), lookahead, steps_per_call),
                host_bytes=capacity * host_row_bytes(spec),
            )
        )
    other = 4 + 8 + 8 + 4 * (NUM_PARTITIONS if num_shards > 1 else 1) + 4 * len(tables) + 8 * NUM_LINES
    return MemoryEstimate(
        tuple(counted), num_shards, other, tuple(tables), tuple(stores), device_bytes, memory_fraction
    )


# The state -----------------------------------------------------------------------------------------------------------


def _grow_to(spec: StoreSpec, reserved: int, num_rows: int) -> int:
    """Returns the capacity that `grow` reaches for `num_rows` of a shard that arrive gradually, with some reserved."""
    capacity = spec.capacity
    while capacity < num_rows + reserved:
        larger = next_capacity(spec, capacity, max(reserved, capacity + 1), None)
        if larger == capacity:
            break
        capacity = larger
    if num_rows > capacity == MAX_CAPACITY:
        names = ", ".join(f'"{table.name}"' for table in spec.tables)
        raise ValueError(
            f"memory_estimate: num_rows: got {num_rows} on each device for the tables {names}, wanted at most "
            f"{MAX_CAPACITY}; use more shards."
        )
    return capacity


def _rows_of(tables: Sequence[TableSpec], num_rows: int | Mapping[str, int] | None) -> list[int]:
    names = [table.name for table in tables]
    known = num_rows if isinstance(num_rows, Mapping) else dict.fromkeys(names, num_rows)
    unknown = sorted(set(known) - set(names))
    if unknown:
        raise ValueError(f"memory_estimate: num_rows: got tables {unknown}, wanted some of {names}.")
    rows = [table.capacity if known.get(table.name) is None else known[table.name] for table in tables]
    return [
        checks.integer(f'memory_estimate: table "{name}": num_rows', number, 0, wanted="a number of rows")
        for name, number in zip(names, rows, strict=True)
    ]


# The step ------------------------------------------------------------------------------------------------------------


def _sizes(
    features: Sequence[FeatureSpec],
    num_samples: int | None,
    keys_per_step: int | Mapping[str, int] | None,
    num_shards: int,
) -> dict[str, tuple[int, int]]:
    """Returns keys and samples of one device by feature; empty if the batch is unknown."""
    op = "memory_estimate"
    if num_samples is not None:
        checks.integer(f"{op}: num_samples", num_samples, 1, wanted="a number of samples, at least 1")
    keys = keys_of(op, features, keys_per_step, num_shards)
    if num_samples is None and keys_per_step is None:
        return {}
    sizes = {}
    for feature, number in zip(features, keys, strict=True):
        if number is None and num_samples is None:
            raise ValueError(
                f'{op}: feature "{feature.name}": keys_per_step: got none, wanted how many keys one device asks in a '
                "step; pass keys_per_step or num_samples."
            )
        if number is None:
            number = not_none(num_samples) * (feature.max_hotness or 1)
        sizes[feature.name] = math.ceil(number), int(math.ceil(number) if num_samples is None else num_samples)
    return sizes


def _step_bytes(
    spec: StoreSpec, features: StoreFeatures, exchange: ExchangeSpec, lookahead: int, steps_per_call: int
) -> dict[str, int]:
    """Counts what a step needs on one device for one store, by purpose; zeros for a store without features."""
    if not features.layouts:
        return dict.fromkeys(STEP, 0)
    sizes = library.load_cpu()
    num_keys = sum(layout.num_keys for layout in features.layouts)
    row = jnp.dtype(spec.embedding_dtype).itemsize * spec.dim
    embeddings = sum(math.prod(layout.embedding_shape) for layout in features.layouts) * row
    # Where samples share bags, the kernels' results exist in addition to the expanded embeddings.
    shared = [layout for layout in features.layouts if layout.inverse_start >= 0]
    embeddings += sum(math.prod(layout.combined_shape) for layout in shared) * row
    found = 4 + 4 * len(COUNTS) * len(spec.tables) + 4 + 8  # generation, counts, rounds, and a ticket for all stores
    arrays = jax.tree.leaves(features)
    batch = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
    parts = {"batch": batch, "embeddings": (1 + lookahead) * embeddings, "gradients": embeddings}
    # Initial rows that XLA computes: a row for each key to write, and one in a slab of their own.
    initial = 2 * spec.itemsize * spec.dim if spec.traced_tables else 0
    if spec.num_shards == 1:
        update = sizes.JaxsokUpdateWorkspaceBytes(num_keys, spec.dim)
        lookup = sizes.JaxsokInsertWorkspaceBytes(num_keys)
        workspace = max(lookup + initial * num_keys, update)
        # The last are on their way; while they are stacked, there are two of each. A call with lookups ahead also has
        # the batches that follow its own.
        is_stacked = steps_per_call > 1
        parts["batch"] *= 3 * (1 + lookahead) * steps_per_call if is_stacked else 1 + lookahead + min(1, lookahead)
        plan = (1 + lookahead) * (4 * num_keys + found + _list_bytes(spec, num_keys))
        return parts | {"plan": plan, "exchange": 0, "workspace": workspace} | _stage(spec, num_keys, workspace)
    capacity = exchange.send_capacity or default_send_capacity(spec, features)
    planned = 1 + lookahead + JOINED_AHEAD  # calls whose batches have plans
    planned += lookahead * (steps_per_call > 1)  # a call also has the plans that follow its own
    batches = planned * steps_per_call
    # Others are packed and sent; while they are stacked, there are two of each.
    parts["batch"] *= (planned + PACKED_AHEAD + (steps_per_call > 1)) * steps_per_call
    if spec.sends_bags:
        num_bags = sum(layout.num_bags for layout in features.layouts)
        received = spec.num_shards * math.ceil(num_keys / capacity) * capacity  # without a plan: room for all
        # uses and row ids by line received; offsets by bag of all shards, scales by bag
        of_bags = 4 * (spec.num_shards + 1) * (num_bags + 1) + found
        use_bytes = 4 * features.use_words
        of_line = use_bytes + 4
        plan = max(of_line * received + of_bags, batches * (of_line * spec.num_shards * capacity + of_bags))
        plan += (1 + lookahead) * _list_bytes(spec, received)
        sums = 4 * spec.dim * spec.num_shards * num_bags
        workspace = max(
            sizes.JaxsokPlanUsesWorkspaceBytes(num_keys),
            sizes.JaxsokInsertWorkspaceBytes(received) + initial * received,
            sizes.JaxsokUpdateWorkspaceBytes(received, spec.dim),
        )
        tables = 0 if features.is_weighted else 4 * received  # of the uses that arrived, computed where they are read
        num_bytes = 2 * sums + tables + use_bytes * (num_keys + 2 * spec.num_shards * capacity)
        parts |= {"plan": plan, "exchange": num_bytes, "workspace": workspace}
        return parts | _stage(spec, received, workspace)
    num_owners = 1 if spec.is_replicated else spec.num_shards
    sent, received = num_owners * capacity, spec.num_shards * capacity
    of_line = REQUEST_BYTES + 4
    # the line of each key; load, digest; requests and row ids by line received
    planned = 4 * num_keys + 16 + of_line * received + found
    # Without a plan the requests are listed: lines, inverse and has_row by key; starts. All of them have room.
    listed = (of_line + 1) * num_keys + 4 * (num_owners + 1)
    room = spec.num_shards * math.ceil(num_keys / capacity) * capacity
    num_bytes = 4 * spec.dim * (2 * received + num_keys) + REQUEST_BYTES * (sent + received) + 32 * received
    # The window wire, which "auto" takes where it can, sorts the uses of a batch in its lookup, and those that arrive
    # while gradients do.
    is_dense = exchange.wire == "dense"
    together = max if is_dense else operator.add
    sorted_uses = 0 if is_dense else (1 + lookahead) * sizes.JaxsokSortedUsesBytes(num_keys)
    workspace = max(
        sizes.JaxsokPlanRequestsWorkspaceBytes(num_keys),
        sizes.JaxsokInsertWorkspaceBytes(room) + initial * (room + num_keys),
        together(*(sizes.JaxsokUpdateWorkspaceBytes(count, spec.dim) for count in (num_keys, received))),
    )
    plan = max(batches * planned + sorted_uses, planned + listed)
    plan += (lookahead if is_dense else 1 + lookahead) * _list_bytes(spec, received)
    parts |= {"plan": plan, "exchange": num_bytes + of_line * room, "workspace": workspace}
    return parts | _stage(spec, room, workspace)


def _list_bytes(spec: StoreSpec, num_keys: int) -> int:
    """Counts the bytes of a list of slots in the cache (`SlotList`)."""
    return 0 if spec.memory is None else 4 * num_keys + 16


def _stage(spec: StoreSpec, num_keys: int, workspace: int) -> dict[str, int]:
    """Counts the bytes that a call with `num_keys` keys stages of rows in host memory, and the larger workspace."""
    if spec.memory is None:
        return {"staged": 0}
    bring = library.load_cpu().JaxsokBringWorkspaceBytes(num_keys)
    return {"staged": staged_bytes(spec, num_keys), "workspace": max(workspace, bring)}
