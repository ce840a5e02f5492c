"""Open an HTML report in a headless Chromium: are its pictures drawn, and does it ask anybody?

The browser comes from npm (packages @sparticuz/chromium, which holds the program itself, and
puppeteer-core), into a folder that is removed afterwards; so node and npm must be there. Exit
status 1: a picture is missing, or the page asked for something.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

PACKAGES = ("@sparticuz/chromium@147", "puppeteer-core@24")
LOOK = """
import chromium from '@sparticuz/chromium';
import puppeteer from 'puppeteer-core';
const [report, picture] = process.argv.slice(2);
const browser = await puppeteer.launch({
  executablePath: await chromium.executablePath(), args: chromium.args, headless: 'shell',
});
const page = await browser.newPage();
const asked = [], errors = [];
page.on('request', (request) => asked.push(request.url()));
page.on('requestfailed', (request) => errors.push(request.url().slice(0, 80)));
page.on('pageerror', (error) => errors.push(String(error)));
await page.setViewport({width: 1200, height: 900});
await page.goto('file://' + report);
const images = await page.evaluate(() => [...document.images].map(
  (image) => ({title: image.alt, width: image.naturalWidth, height: image.naturalHeight})));
await page.screenshot({path: picture, fullPage: true});
const outside = asked.filter((url) => !url.startsWith('data:') && url !== 'file://' + report);
console.log(JSON.stringify({browser: await browser.version(), images, outside, errors}));
await browser.close();
"""


def look(report: Path, picture: Path) -> dict[str, list[object]]:
    """What the browser saw; the page as a PNG goes to ``picture``."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "look.mjs").write_text(LOOK)
        install = ["npm", "install", "--no-audit", "--no-fund", "--silent", *PACKAGES]
        subprocess.run(install, cwd=folder, check=True)
        # The package unpacks its libraries only where it believes to be in a cloud function, and
        # everything, fonts too, into the folder for temporary files; it seeks the fonts elsewhere.
        fonts = Path(folder, "fonts.conf")
        fonts.write_text(f"<fontconfig><dir>{folder}</dir></fontconfig>")
        env = ["env", "-u", "LD_PRELOAD", f"TMPDIR={folder}", f"FONTCONFIG_FILE={fonts}"]
        env.append("AWS_EXECUTION_ENV=AWS_Lambda_nodejs22.x")
        node = [*env, "node", "look.mjs", str(report.resolve()), str(picture.resolve())]
        seen = subprocess.run(node, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, list[object]] = json.loads(seen.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--picture", type=Path, default=Path("report.png"))
    given = parser.parse_args()
    seen = look(given.report, given.picture)
    print(json.dumps(seen, indent=2))
    drawn = [image for image in seen["images"] if isinstance(image, dict) and image["width"] > 0]
    if not drawn or len(drawn) < len(seen["images"]) or seen["outside"] or seen["errors"]:
        raise SystemExit("FAILED")
    print(f"passed: {len(drawn)} pictures, nobody was asked")


if __name__ == "__main__":
    main()
