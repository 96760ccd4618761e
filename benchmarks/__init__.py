"""Benchmarks of jaxsok: named workloads, each with its limit and its peers. `README.md` says how to run them."""
