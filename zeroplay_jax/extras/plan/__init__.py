"""Plans of runs on machines: the fields of a config that depend on a machine, and the memory that a run takes there."""
