"""A model of a session: `Served` (served.py), over the rows of a device or of its cache (readers.py).

versions.py has its versions, store_plans.py what an update changes.
"""
