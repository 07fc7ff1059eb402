"""What tests look at in the directory of a run with checkpoints."""

import os


def snapshot(directory):
    """Every file's bytes and every folder, by their names."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
    }


def checkpoints(directory):
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdigit())


def unfinished_saves(directory):
    """The temporary folders of saves; with their i-nodes, since a name comes back."""
    if not directory.exists():
        return set()
    with os.scandir(directory) as entries:
        return {
            (entry.name, entry.inode()) for entry in entries if "-tmp" in entry.name
        }


def cut_to_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
