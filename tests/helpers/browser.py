"""Drive Chromium over a pipe, for tests: open pages, set size and colour scheme, evaluate JavaScript."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

AXE = Path(__file__).resolve().parents[2] / "runs/axe/node_modules/axe-core/axe.min.js"  # `make axe`
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
JUDGE = (
    f"axe.run(document, {{runOnly: {RULES}}}).then(found => found.violations.map("
    "v => `${v.id}: ${v.help}: ${v.nodes.length} times, ${v.nodes[0].html.slice(0, 200)}`))"
)
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# what doesn't fit into the window: elements cut at its edge unless they scroll, cells narrower than a word, and tables
# whose rows are made tall by cells that are out of sight
MISFITS = """(() => {
  const width = document.documentElement.clientWidth, wrong = new Set();
  const pen = document.createElement("canvas").getContext("2d");
  const scrolls = e => e && (/auto|scroll/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  const shown = e => e.checkVisibility({visibilityProperty: true}) && !e.closest(".md-header, .md-sidebar, .md-search");
  const text = e => `<${e.tagName.toLowerCase()}> ${e.textContent.trim().slice(0, 60)}`;
  for (const e of document.body.querySelectorAll("main *, section *, body > *"))
    if (shown(e) && e.getBoundingClientRect().right > width + 1 && !scrolls(e.parentElement) && !scrolls(e))
      wrong.add(`cut: ${text(e)}`);
  for (const cell of document.querySelectorAll("td, th")) if (shown(cell)) {
    const style = getComputedStyle(cell), table = cell.closest("table"), lines = parseFloat(style.fontSize) * 1.6;
    pen.font = style.font;
    const words = cell.textContent.split(/[^A-Za-z]+/).filter(word => word.length < 15);
    const room = cell.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    if (Math.max(0, ...words.map(word => pen.measureText(word).width)) > room + 1) wrong.add(`narrow: ${text(cell)}`);
    const isWide = table.scrollWidth > width - 20;
    if (isWide && style.display === "table-cell" && cell.clientHeight > 6 * lines) wrong.add(`tall: ${text(cell)}`);
  }
  return [...wrong];
})()"""
SETTLED = "new Promise(done => setTimeout(done, 500))"  # until layout and colours have settled


class Browser:
    """A page of a headless Chromium; a context manager."""

    def __init__(self, profile: Path) -> None:
        theirs_in, self.out = os.pipe()
        self.incoming, theirs_out = os.pipe()
        chromium = shutil.which("chromium")
        assert chromium is not None
        flags = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe --allow-file-access-from-files"
        command = [chromium, *flags.split(), f"--user-data-dir={profile}", "about:blank"]
        # the protocol uses descriptors 3 and 4; only bash can redirect from descriptors of two digits
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self.buffer, self.number, self.session = b"", 0, ""
        self.errors: list[str] = []  # errors of the page and its console
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.out)
        os.close(self.incoming)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol and return its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.next_message()
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def wait_for(self, event: str) -> None:
        while self.next_message().get("method") != event:
            pass

    def next_message(self) -> dict[str, Any]:
        """Return the next answer or event; collect errors of the page in `errors`."""
        while b"\0" not in self.buffer:
            piece = os.read(self.incoming, 1 << 20)
            assert piece, "chromium has exited"
            self.buffer += piece
        line, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(line)
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"]["exception"].get("description", "an exception"))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str(params["args"]))
        return message

    def open(self, address: str) -> None:
        """Load a page and wait until it is loaded."""
        self.call("Page.navigate", url=address)
        self.wait_for("Page.loadEventFired")

    def show(self, width: int, theme: str) -> None:
        """Set the width of the window in pixels and the colour scheme, light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=1600, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def unreadable(self, page: Path) -> list[str]:
        """Return a page's accessibility problems at two widths and in both themes, by axe-core, and its errors."""
        wrong = []
        self.errors.clear()
        for theme in ("light", "dark"):
            self.show(1200, theme)
            self.open(page.as_uri())
            self.ask(AXE.read_text() + ";0")
            for width in (1200, 400):
                self.show(width, theme)
                self.ask(SETTLED)
                problems = self.ask(JUDGE)
                if self.ask(WIDER) > 0:
                    problems.append("it scrolls sideways")
                wrong += [f"{page.name}, {width}, {theme}: {each}" for each in problems]
        return wrong + [f"{page.name}: {error}" for error in self.errors]

    def misfits(self, page: Path, width: int) -> list[str]:
        """Return what of a page doesn't fit into a window of this width."""
        self.show(width, "light")
        self.open(page.as_uri())
        self.ask(SETTLED)
        problems = self.ask(MISFITS) + ["it scrolls sideways"] * (self.ask(WIDER) > 0)
        return [f"{page.name}, {width}: {each}" for each in problems]

    def ask(self, expression: str) -> Any:
        """Evaluate a JavaScript expression, await it, and return its value."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")
