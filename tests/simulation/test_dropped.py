"""A bucket that is dropped and made anew under its name while clients follow it, under many seeds."""

from pathlib import Path

from tests.simulation import worlds


def test_clients_of_a_dropped_bucket_come_to_have_the_new_one_alone(tmp_path: Path) -> None:
    counts = worlds.run_all("dropped", tmp_path, worlds.seeds(10))
    worlds.happened(
        counts,
        "BUCKET_GONE at an Open",
        "BUCKET_GONE over the network",
        "buckets made anew",
        "clients died",
        "crashes without a bucket",
        "dropped buckets there again",
        "raised BUCKET_NOT_FOUND",
        "undone for a new version",
    )
