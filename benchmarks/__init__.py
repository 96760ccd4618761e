"""Benchmarks of jaxsok: named workloads, each beside its limit and its peers. `README.md` says how to run them."""
