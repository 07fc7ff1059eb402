"""Helpers that look into the checkpoint directory of a run."""

import os


def snapshot(directory):
    """Return the bytes of every file, and None for every folder, by relative path."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
    }


def checkpoints(directory):
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdigit())


def unfinished_saves(directory):
    """Return temporary folders of saves, with inodes because names are reused."""
    if not directory.exists():
        return set()
    with os.scandir(directory) as entries:
        return {
            (entry.name, entry.inode()) for entry in entries if "-tmp" in entry.name
        }


def cut_to_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def largest_file(directory):
    return max(directory.rglob("*"), key=lambda path: path.stat().st_size)
