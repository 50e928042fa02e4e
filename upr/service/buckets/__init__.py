"""Buckets at work: the catalog, and for each open bucket its disk, its threads and its background tasks."""
