"""A device cache: some rows of the tables of a model on the device, over a source that has them all.

`DeviceCache` (device_cache.py) answers lookups. Below it: the arrays on the device and their lock (stores.py), their
programs (programs.py) and which of them are compiled (compiled.py), rows from the source (fetcher.py), and refreshes
and swaps (changes.py).
"""

from jaxsok.serving.cache.device_cache import MIN_ROWS as MIN_ROWS
from jaxsok.serving.cache.device_cache import CachedRows, CachedTables, DeviceCache, cache_bytes, cached_spec
from jaxsok.serving.cache.stats import CacheStats, TableCounts

__all__ = ["CacheStats", "CachedRows", "CachedTables", "DeviceCache", "TableCounts", "cache_bytes", "cached_spec"]
