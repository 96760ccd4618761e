"""Proposes placements of tables on a mesh, by their size and traffic, before there is a collection.

The model, of one step, one device out of N and one table of R rows, of which the device asks K keys:

- Distinct keys u: as measured in a sample; else those of K draws from R equally likely keys, R (1 - exp(-K / R)).
  Skewed keys have fewer.
- A line is one distinct key's part of the exchange: its request (16 bytes), its row and its row gradient, in the dtypes
  of the wire.
- SHARDED: every owner gets u / N of the requests of every device. A device sends, and gets, u (N - 1) / N lines.
- on(d): the exchange is dense, so a device sends every owner as many lines as the most loaded one gets. Alone in its
  store, the table costs (N - 1) u lines. Tables that load all devices alike cost what they cost sharded, never less.
- SHARDED with partial bags (`FeatureSpec(exchange="bags")`): every use sends its key (8 bytes, 16 with weights),
  K (N - 1) / N of them, and B bags send a sum and a gradient for each other device, B (N - 1) of both. Chosen where a
  sample shows that this is less, and all features of the table have a combiner.
- REPLICATED: requests and gradients of all devices are gathered, (N - 1) u lines without rows; no row travels. Each
  device keeps R rows and moves the rows of N u lines.

Not counted: padding, and the fixed cost of a collective: a replicated store adds collectives of its own.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxsok import adapters, checks, raw_features, specs as specs_lib, split
from jaxsok.checks import not_none
from jaxsok.exchange import wire_bytes
from jaxsok.features import Bags
from jaxsok.printed import format_bytes, format_columns, name_devices
from jaxsok.specs import REPLICATED, SHARDED, ExchangeSpec, FeatureSpec, Placement, StoreSpec, TableSpec
from jaxsok.store import host_row_bytes, row_bytes, store_bytes
from jaxsok.types import KEY_WORDS, PADDING_KEY, REQUEST_WORDS

REQUEST_BYTES = 4 * REQUEST_WORDS  # key, table and uses
KEY_BYTES = 4 * KEY_WORDS
REPLICATED_BYTES = 64 << 20  # larger tables are replicated only when asked for


@dataclasses.dataclass(frozen=True)
class TableProposal:
    """A table's traffic and costs, and the placement proposed for it."""

    table: TableSpec
    """The table with its placement."""
    keys: float
    """Keys that one device asks in a step."""
    distinct_keys: float
    """Distinct keys among these; if all devices are alike, as many lines travel."""
    num_bytes: int
    """Bytes of its rows, with optimizer state, records and index, once; of rows in host memory what devices have."""
    wire_bytes: Mapping[str, int]
    """Bytes received by a device in a step: "sharded", "on" (alone on its device), "replicated"; with a sample also
    "bags" (sharded, with partial bags), where the features of the table can."""
    reason: str
    exchange: Literal["rows", "bags"] = "rows"
    """The value for `FeatureSpec(exchange=...)`: rows or partial bags travel between devices."""


@dataclasses.dataclass(frozen=True)
class Proposal:
    """The placements that `propose` chose, and their costs. `str` makes a table of it."""

    lines: tuple[TableProposal, ...]
    num_shards: int
    wire_bytes: int
    """Bytes received by each device in a step: all stores together, on(...) at its true load."""
    bytes_per_device: tuple[int, ...]
    """Bytes of the rows that each shard has when the tables are full."""
    allocated_bytes: int
    """Bytes of the stores on each device, as `init` makes them: all shards get the size of the fullest, with room for
    the unevenness of hashing."""
    features: tuple[FeatureSpec, ...]
    """The features with what they exchange, for the collection."""
    host_bytes: int = 0
    """Bytes of rows in host memory, for each device, as `init` makes them."""

    @property
    def tables(self) -> tuple[TableSpec, ...]:
        """The tables with their placements, for the collection."""
        return tuple(line.table for line in self.lines)

    def __str__(self) -> str:
        kinds = ("sharded", "bags", "on", "replicated")
        head = ("table", "rows", "bytes", "keys", "distinct", *kinds[:2], "on one", kinds[3], "placement", "reason")
        body = [
            (
                line.table.name,
                f"{line.table.capacity:,}",
                format_bytes(line.num_bytes),
                f"{line.keys:,.0f}",
                f"{line.distinct_keys:,.0f}",
                *(format_bytes(line.wire_bytes[kind]) if kind in line.wire_bytes else "-" for kind in kinds),
                str(line.table.placement) + (", bags" if line.exchange == "bags" else ""),
                line.reason,
            )
            for line in self.lines
        ]
        rows = format_columns(head, body, is_text=(0, 9, 10))
        each = name_devices(self.num_shards)
        used = sorted(
            {format_bytes(num_bytes) for num_bytes in (min(self.bytes_per_device), max(self.bytes_per_device))}
        )
        return "\n".join(
            [
                *rows,
                f"A step sends {format_bytes(self.wire_bytes)} to {each}. Full tables take {' to '.join(used)} of the "
                f"{format_bytes(self.allocated_bytes)} allocated on {each}."
                + (f" {format_bytes(self.host_bytes)} of host memory for {each}." if self.host_bytes else ""),
            ]
        )


def propose(
    tables: Sequence[TableSpec],
    features: Sequence[FeatureSpec],
    *,
    num_shards: int,
    keys_per_step: int | Mapping[str, int] | None = None,
    sample: Mapping[str, Any] | None = None,
    exchange: ExchangeSpec | None = None,
    overrides: Mapping[str, Placement] | None = None,
) -> Proposal:
    """Chooses a placement for each table, and what its features exchange, by the bytes that it puts on the wire.

    A table is replicated if that sends fewer bytes than sharding and its rows are few; else it is sharded. On training
    traffic with one dtype for rows and gradients that never happens, since all gradients go to all devices. It does
    where gradients are much smaller on the wire than rows. A table goes to one device only when asked for, since that
    never saves bytes. A placement other than SHARDED that a TableSpec declares stands; `overrides` take precedence.
    Partial bags are proposed where features declare them, and from a sample: make the collection of `proposal.tables`
    and `proposal.features`.

    Args:
      tables: their `capacity` counts as their rows.
      features: of the collection to be.
      num_shards: devices along its axis.
      keys_per_step: keys, without padding, that one device's part of a batch has for each feature; one number for all.
        Without it: max_keys of the feature, shared out. Keys are taken to be equally likely.
      sample: instead: a raw batch of all devices, as `collection.batch` takes it, NumPy. Its keys are counted.
      exchange: dtypes on the wire, as the collection gets them.
      overrides: placements by table.

    Raises:
      TypeError, ValueError: unknown names, a device outside the axis, a feature without a number of keys.

    Example:
      >>> from jaxsok import optim
      >>> tables = [TableSpec("user", 64, optim.sgd(0.1)), TableSpec("day", 64, optim.sgd(0.1), capacity=7)]
      >>> features = [FeatureSpec("user", table="user"), FeatureSpec("day", table="day")]
      >>> proposal = propose(tables, features, num_shards=4, keys_per_step=1000, overrides={"day": REPLICATED})
      >>> [(line.table.placement, round(line.distinct_keys)) for line in proposal.lines]
      [(SHARDED, 992), (REPLICATED, 7)]
    """
    specs_lib.check_declarations("propose", tables, features, num_shards, exchange)
    if sample is not None and keys_per_step is not None:
        raise ValueError("propose: sample: got one in addition to keys_per_step, wanted one of the two.")
    if sample is not None:
        traffic = _measure(tables, features, sample, num_shards)
    else:
        traffic = _assume(tables, features, keys_per_step, num_shards)
    forced = _collect_forced(tables, overrides or {}, num_shards)
    model = _Model(num_shards, exchange or ExchangeSpec())
    lines = [_propose(model, table, traffic[table.name], forced) for table in tables]
    of_bags = specs_lib.bag_tables(features)
    lines = [_with_form(line, of_bags) for line in lines]
    form = {line.table.name: line.exchange for line in lines}
    return Proposal(
        tuple(lines),
        int(num_shards),
        model.count_bytes_of_stores(lines),
        _bytes_per_device(lines, num_shards),
        _allocated_bytes(lines, num_shards),
        tuple(dataclasses.replace(feature, exchange=form[feature.table]) for feature in features),
        sum(store.capacity * host_row_bytes(store) for store in _stores_of(lines, num_shards)),
    )


def read_batch(raw: Mapping[str, Any], features: Sequence[FeatureSpec], what: str) -> dict[str, tuple[Bags, int]]:
    """Does `split.read_bags` with all features of a raw batch; refuses what `Collection.batch` refuses."""
    raw_features.require_features(raw, features)
    raw = adapters.convert_features(raw, features, what)
    raw_features.require_samples(raw, features)
    read = {}
    for spec in features:
        of_feature = f'{what}: feature "{spec.name}"'
        read[spec.name] = bags, _ = split.read_bags(spec, raw[spec.name], of_feature)
        raw_features.require_declared(spec, bags, of_feature)
    return read


# Traffic -------------------------------------------------------------------------------------------------------------


class _Traffic(NamedTuple):
    """The keys that one device asks of a table in a step, on average."""

    keys: float
    distinct: float
    bags: float | None = None
    """None: not known, or not all features of the table have bags."""
    is_weighted: bool = False
    """Whether a feature has weights, which travel with the uses of its bags."""


def _assume(
    tables: Sequence[TableSpec],
    features: Sequence[FeatureSpec],
    keys_per_step: int | Mapping[str, int] | None,
    num_shards: int,
) -> dict[str, _Traffic]:
    """Computes keys and distinct keys of each table, if all of its rows are equally likely."""
    keys = dict.fromkeys((table.name for table in tables), 0.0)
    for feature, number in zip(features, keys_of("propose", features, keys_per_step, num_shards), strict=True):
        if number is None:
            raise ValueError(
                f'propose: feature "{feature.name}": keys_per_step: got none, wanted how many keys one device asks in '
                "a step; pass keys_per_step, or a sample."
            )
        keys[feature.table] += number
    rows = {table.name: table.capacity for table in tables}
    return {name: _Traffic(number, -rows[name] * math.expm1(-number / rows[name])) for name, number in keys.items()}


def keys_of(
    op: str, features: Sequence[FeatureSpec], keys_per_step: int | Mapping[str, int] | None, num_shards: int
) -> list[float | None]:
    """Returns each feature's keys on one device in a step; None where neither the caller nor `max_keys` says."""
    known = keys_per_step if isinstance(keys_per_step, Mapping) else {}
    unknown = sorted(set(known) - {feature.name for feature in features})
    if unknown:
        raise ValueError(
            f"{op}: keys_per_step: got features {unknown}, wanted some of {[feature.name for feature in features]}."
        )
    keys: list[float | None] = []
    for feature in features:
        number = known.get(feature.name) if isinstance(keys_per_step, Mapping) else keys_per_step
        if number is None and feature.max_keys is not None:
            number = feature.max_keys / num_shards
        if number is not None:
            what = f'{op}: feature "{feature.name}": keys_per_step'
            number = float(checks.number(what, number, 0, math.inf, "a number, at least 0"))
        keys.append(number)
    return keys


def _measure(
    tables: Sequence[TableSpec], features: Sequence[FeatureSpec], sample: Mapping[str, Any], num_shards: int
) -> dict[str, _Traffic]:
    """Counts keys, distinct keys and bags of each table in a batch: means over the devices' parts of it."""
    read = read_batch(sample, features, "propose: sample")
    parts: dict[str, list[list[np.ndarray]]] = {table.name: [[] for _ in range(num_shards)] for table in tables}
    bags_of = dict.fromkeys(parts, 0.0)
    for feature in features:
        bags, num_bags = read[feature.name]
        samples = np.arange(num_bags) if bags.inverse is None else bags.inverse
        for part, of_device in zip(parts[feature.table], np.array_split(samples, num_shards), strict=True):
            used = np.unique(of_device)  # bags
            bags_of[feature.table] += used.size / num_shards if feature.combiner else math.inf
            cut = split.pick_bags(bags, used).keys.reshape(-1)
            part.append(cut[cut != np.uint64(PADDING_KEY)])
    traffic = {}
    for name, of_devices in parts.items():
        joined = [np.concatenate([np.zeros(0, np.uint64), *cuts]) for cuts in of_devices]
        traffic[name] = _Traffic(
            float(np.mean([part.size for part in joined])),
            float(np.mean([np.unique(part).size for part in joined])),
            None if math.isinf(bags_of[name]) else bags_of[name],
            any(feature.weighted for feature in features if feature.table == name),
        )
    return traffic


# Costs ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Model:
    """Bytes that a device receives in a step; see the top of the module."""

    num_shards: int
    exchange: ExchangeSpec

    def sharded_bytes(self, rows: TableSpec | StoreSpec, lines: float) -> int:
        """Returns the bytes of requests, rows and gradients; `lines` are those of a device to the most loaded owner."""
        line = REQUEST_BYTES + wire_bytes(rows.dim, self.exchange.rows, rows.dtype)
        line += wire_bytes(rows.dim, self.exchange.gradients)
        return round(lines * (self.num_shards - 1) * line)

    def replicated_bytes(self, rows: TableSpec | StoreSpec, distinct: float) -> int:
        line = REQUEST_BYTES + wire_bytes(rows.dim, self.exchange.gradients)
        return round(distinct * (self.num_shards - 1) * line)

    def bags(self, table: TableSpec, traffic: _Traffic, *, is_on_one: bool) -> int:
        uses = traffic.keys if is_on_one else traffic.keys / self.num_shards  # of the most loaded owner
        of_uses = (REQUEST_BYTES if traffic.is_weighted else KEY_BYTES) * uses
        of_bags = wire_bytes(table.dim, self.exchange.rows) + wire_bytes(table.dim, self.exchange.gradients)
        return round((self.num_shards - 1) * (of_uses + not_none(traffic.bags) * of_bags))

    def count_bytes_of_stores(self, lines: Sequence[TableProposal]) -> int:
        """Returns the bytes of all tables together, as the stores send them."""
        of_bags = {
            line.table.name: line.wire_bytes.get("bags")
            for line in lines
            if line.exchange == "bags" and line.table.placement != REPLICATED
        }
        total = sum(number or 0 for number in of_bags.values())
        distinct = {line.table.name: line.distinct_keys for line in lines}
        # Without a sample the bags are unknown: such tables count as if they sent rows.
        of_rows = [line.table for line in lines if of_bags.get(line.table.name) is None]
        for store in specs_lib.group_into_stores(of_rows, self.num_shards):
            if store.is_replicated:
                total += self.replicated_bytes(store, sum(distinct[table.name] for table in store.tables))
                continue
            pinned, spread = specs_lib.sum_pinned_and_spread(
                ((t, distinct[t.name]) for t in store.tables), self.num_shards
            )
            # The exchange is dense: the most loaded device decides how many lines go to each.
            total += self.sharded_bytes(store, spread / self.num_shards + pinned)
        return total


def _collect_forced(
    tables: Sequence[TableSpec], overrides: Mapping[str, Placement], num_shards: int
) -> dict[str, tuple[Placement, str]]:
    """Collects the placements that are not the planner's to choose, with reasons."""
    names = [table.name for table in tables]
    unknown = sorted(set(overrides) - set(names))
    if unknown:
        raise ValueError(f"propose: overrides: got tables {unknown}, wanted some of {names}.")
    forced = {table.name: (table.placement, "declared so") for table in tables if table.placement != SHARDED}
    for name, placement in overrides.items():
        if not isinstance(placement, Placement):
            raise TypeError(
                f'propose: overrides: table "{name}": got {placement!r}, wanted jaxsok.SHARDED, jaxsok.REPLICATED or '
                "jaxsok.on(device)."
            )
        forced[name] = (placement, "asked for")
    for name, (placement, _) in forced.items():
        specs_lib.require_shard("propose", name, placement, num_shards)
    return forced


def _propose(
    model: _Model,
    table: TableSpec,
    traffic: _Traffic,
    forced: Mapping[str, tuple[Placement, str]],
) -> TableProposal:
    num_bytes = table.capacity * row_bytes(specs_lib.group_into_stores([table])[0])
    bytes_by_kind = {
        "sharded": model.sharded_bytes(table, traffic.distinct / model.num_shards),
        "on": model.sharded_bytes(table, traffic.distinct),
        "replicated": model.replicated_bytes(table, traffic.distinct),
    }
    sharded, replicated = bytes_by_kind["sharded"], bytes_by_kind["replicated"]
    placement = SHARDED
    if table.name in forced:
        placement, reason = forced[table.name]
        least = min(sharded, replicated)
        if model.num_shards > 1 and bytes_by_kind[placement.kind] > least:
            reason += f"; {bytes_by_kind[placement.kind] / max(least, 1):.1f} times the bytes of the cheapest"
            reason += ", less if others balance it" if placement.kind == "on" else ""
    elif model.num_shards == 1:
        reason = "one device"
    elif table.memory is not None:
        reason = "rows in host memory are not replicated"
    elif replicated >= sharded:
        reason = f"replicated sends {replicated / max(sharded, 1):.1f} times as much" if sharded else "no keys"
    elif num_bytes > REPLICATED_BYTES:
        reason = f"replicated sends less, but takes {format_bytes(num_bytes)} on every device"
    else:
        placement = REPLICATED
        reason = f"sends {replicated / sharded:.2f} of the bytes of sharded; small"
    if traffic.bags is not None:
        bytes_by_kind["bags"] = model.bags(table, traffic, is_on_one=placement.kind == "on")
    placed = dataclasses.replace(table, placement=placement)
    return TableProposal(placed, traffic.keys, traffic.distinct, num_bytes, bytes_by_kind, reason)


def _with_form(line: TableProposal, declared: frozenset[str]) -> TableProposal:
    """Chooses the exchange of a placed table's features, unless they declare bags."""
    if line.table.name in declared:
        return dataclasses.replace(line, exchange="bags", reason=f"{line.reason}; bags declared")
    of_rows = line.wire_bytes[line.table.placement.kind]
    of_bags = line.wire_bytes.get("bags", of_rows)
    if line.table.placement == REPLICATED or of_bags >= of_rows:
        return line
    reason = f"{line.reason}; bags send {of_bags / of_rows:.2f} of the bytes of rows"
    return dataclasses.replace(line, exchange="bags", reason=reason)


# Memory --------------------------------------------------------------------------------------------------------------


def _stores_of(lines: Sequence[TableProposal], num_shards: int) -> tuple[StoreSpec, ...]:
    of_bags = frozenset(line.table.name for line in lines if line.exchange == "bags")
    return specs_lib.group_into_stores([line.table for line in lines], num_shards, of_bags)


def _bytes_per_device(lines: Sequence[TableProposal], num_shards: int) -> tuple[int, ...]:
    """Returns the bytes of the rows that each shard has when all tables are full."""
    of_shard = [0.0] * num_shards
    for store in _stores_of(lines, num_shards):
        for table in store.tables:
            num_bytes = table.capacity * row_bytes(store)
            if table.placement.kind == "on":
                of_shard[table.placement.shard % num_shards] += num_bytes
            else:
                share = 1 if store.is_replicated else num_shards
                of_shard = [so_far + num_bytes / share for so_far in of_shard]
    return tuple(map(math.ceil, of_shard))


def _allocated_bytes(lines: Sequence[TableProposal], num_shards: int) -> int:
    """Returns the bytes of all stores on one device, as `init` makes them."""
    return sum(sum(store_bytes(store, store.capacity).values()) for store in _stores_of(lines, num_shards))
