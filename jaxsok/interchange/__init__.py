"""Tables in files of other systems, in and out: records to bytes and back, a chunk at a time.

hps.py has the pair of HugeCTR's parameter server, sok.py the dump of SparseOperationKit, columns.py Parquet and Arrow,
npz.py NumPy's own. Each has a layer on `Records`, which needs no table, and `save` and `load` on a collection. Imported
by the user, module by module. What all formats share is in files.py. Checkpoints are not here.
"""
