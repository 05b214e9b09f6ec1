"""The page itself: one file, which loads nothing and runs no script but its own. Text is set as text, never as HTML."""

import json
from html import escape
from pathlib import Path
from typing import Any

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"

STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
SCRIPT = (Path(__file__).parent / "page.js").read_text(encoding="utf-8")


def render(snapshot: dict[str, Any], *, live: bool) -> str:
    """The page of this moment; a live one then asks its server every second."""
    data = json.dumps(snapshot, allow_nan=False).replace("<", "\\u003c")  # so that no text can end the element
    sections = [
        '<div id="title"></div><p id="facts"></p><p id="state"></p><div id="cards" class="cards"></div>',
        '<h2>Curves</h2><div id="curves" class="curves"></div>',
        '<h2>Ranks</h2><div id="ranks" class="ranks"></div><p id="health"></p>',
        '<h2>Last step, on this rank</h2><div id="timeline" class="timeline"></div>',
        '<h2>Groups, per step on this rank</h2><div class="wide"><table id="groups"></table></div>',
    ]
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(str(snapshot['title']))}</title>",
        f"<style>{STYLE}</style>",
    ]
    body = [*sections, f'<script type="application/json" id="data">{data}</script>', f"<script>{SCRIPT}</script>"]
    mark = "yes" if live else "no"
    lines = ["<!DOCTYPE html>", '<html lang="en">', "<head>", *head, "</head>", f'<body data-live="{mark}">', *body]
    return "\n".join([*lines, "</body>", "</html>"]) + "\n"
