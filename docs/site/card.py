"""Draw card.png, the preview image for links to the site: python docs/site/card.py (needs Chromium)."""

import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PICTURE = HERE.parent / "lecture" / "overoptimisation.svg"
CARD = """<!doctype html><meta charset="utf-8"><style>
body { margin: 0; width: 1200px; height: 630px; box-sizing: border-box; padding: 40px 60px; background: #fff;
  color: #1c2024; font: 30px/1.3 system-ui, sans-serif; }
h1 { font-size: 64px; margin: 0; } p { margin: 8px 0 18px; color: #565d66; } img { width: 1080px; }
</style><h1>nanorlhf</h1><p>RLHF with nothing hidden, judged by the true reward.</p>
<img src="PICTURE">"""


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / "card.html"
        page.write_text(CARD.replace("PICTURE", PICTURE.as_uri()))
        flags = "--headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1200,630"
        command = ["chromium", *flags.split(), f"--user-data-dir={directory}/profile"]
        subprocess.run([*command, f"--screenshot={HERE / 'card.png'}", page.as_uri()], check=True)


if __name__ == "__main__":
    main()
