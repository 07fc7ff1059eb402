"""Every test sees 8 devices, and does not wait for ever with 2 cores behind them."""

import os

collect_ignore = ["docs/conf.py"]  # of Sphinx, which the tests do without

flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"
os.environ.setdefault("NPROC", "32")
