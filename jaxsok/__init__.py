"""jaxsok: dynamic embedding tables for JAX, on CPU and on NVIDIA GPUs.

Rows appear as 64-bit keys are first seen; a lookup gives embeddings, `jax.grad` differentiates with respect to them,
an update moves the rows that were used. Start with `Collection`.
"""

from jaxsok import initializers, optimizers as optim, policies
from jaxsok.adapters import Coo, from_kjt, safe_bags
from jaxsok.caches import CacheEstimate, CacheStats, cache_estimate
from jaxsok.collection import Collection
from jaxsok.combine import combine_clipped
from jaxsok.comparison import Parity, parity
from jaxsok.evict import Evicted
from jaxsok.features import Bags, Batch, Features
from jaxsok.memory import MemoryEstimate, StoreMemory, memory_estimate
from jaxsok.plan import Plan
from jaxsok.planner import Proposal, TableProposal, propose
from jaxsok.records import Records
from jaxsok.scanning import scan
from jaxsok.specs import REPLICATED, SHARDED, ExchangeSpec, FeatureSpec, HostMemory, Placement, StoreSpec, TableSpec, on
from jaxsok.stats import Stats
from jaxsok.stats_window import StatsWindow, write_scalars
from jaxsok.store import State, StoreState
from jaxsok.types import NO_ROW, PADDING_KEY, NonFiniteGradientError, StalePlanError, TableFullError

__version__ = "0.1.0"

__all__ = [
    "NO_ROW",
    "PADDING_KEY",
    "REPLICATED",
    "SHARDED",
    "Bags",
    "Batch",
    "CacheEstimate",
    "CacheStats",
    "Collection",
    "Coo",
    "Evicted",
    "ExchangeSpec",
    "FeatureSpec",
    "Features",
    "HostMemory",
    "MemoryEstimate",
    "NonFiniteGradientError",
    "Parity",
    "Placement",
    "Plan",
    "Proposal",
    "Records",
    "StalePlanError",
    "State",
    "Stats",
    "StatsWindow",
    "StoreMemory",
    "StoreSpec",
    "StoreState",
    "TableFullError",
    "TableProposal",
    "TableSpec",
    "cache_estimate",
    "combine_clipped",
    "from_kjt",
    "initializers",
    "memory_estimate",
    "on",
    "optim",
    "parity",
    "policies",
    "propose",
    "safe_bags",
    "scan",
    "write_scalars",
]
