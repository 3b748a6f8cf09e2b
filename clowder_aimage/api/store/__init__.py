"""The store of a worker: sizes, referrers, adapters, and jobs that make AImages from others."""
