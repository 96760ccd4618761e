"""A device cache: some rows of the tables of a model on the device, over a source that has them all.

`DeviceCache` answers lookups, fills, refreshes and swaps. stores.py has the arrays and their lock, requests.py fetches
what they lack from a source of backing.py, and programs.py has the programs.
"""

from jaxsok.serving.cache.device_cache import MIN_ROWS as MIN_ROWS, CachedRows, DeviceCache, cache_bytes
from jaxsok.serving.cache.stores import CacheStats, TableCounts

__all__ = ["CacheStats", "CachedRows", "DeviceCache", "TableCounts", "cache_bytes"]
