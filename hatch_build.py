"""The README and the links of a release, absolute if the project has an address."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class AddressHook(MetadataHookInterface):
    """Reads `address` from `[tool.hatch.metadata.hooks.custom]` in `pyproject.toml`."""

    def update(self, metadata: dict[str, Any]) -> None:
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        address = self.config["address"].rstrip("/")
        if address:
            tag = f"v{metadata['version']}"
            readme = re.sub(r"(!\[[^]]*\]\()\./", rf"\1{address}/raw/{tag}/", readme)
            readme = readme.replace("](./", f"]({address}/blob/{tag}/")
            changes = f"{address}/blob/{tag}/CHANGELOG.md"
            metadata["urls"] = {"Source": address, "Changelog": changes}
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
