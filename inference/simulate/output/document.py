"""An HTML document without scripts or external resources, for light and dark mode, with tables and plots. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from inference.simulate.output.plot import Plot

_STYLE = """
:root{color-scheme:light dark;--bg:#fbfaf8;--raised:#fff;--line:#e4e0d8;--text:#1f1e1b;--muted:#6b675f;
--shade:#00000010;--ready:#79c3b4;--resting:#c3e4dc;--warm:#e0a030;--coming:#c4beb2;--needed:#1f1e1b;
--good:#1b8573;--bad:#bf3b22;--p50:#1b8573;
--p99:#c2571a;--c0:#1b8573;--c1:#c2571a;--c2:#5b62c4;--c3:#b08900;--c4:#b03a78;--c5:#5c7a8a}
@media(prefers-color-scheme:dark){:root{--bg:#171715;--raised:#20201d;--line:#33322d;--text:#ecebe6;--muted:#a19d93;
--shade:#ffffff12;--ready:#20796b;--resting:#17453e;--warm:#d99a2b;--coming:#57544c;--needed:#ecebe6;
--good:#4cbfaa;--bad:#f0806a;
--p50:#4cbfaa;--p99:#f09a5c;--c0:#4cbfaa;--c1:#f09a5c;--c2:#9aa0ff;--c3:#dcb93c;--c4:#ec7fb5;--c5:#9dbccb}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:28px 24px 48px;background:var(--bg);color:var(--text);
font:15px/1.5 ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
h1{font-size:22px;margin:0 0 4px;letter-spacing:-.01em}
h2{font-size:17px;margin:36px 0 10px}
p{margin:0 0 4px;color:var(--muted);max-width:110ch}
.table{overflow-x:auto;margin-top:18px;background:var(--raised);border:1px solid var(--line);border-radius:10px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:9px 11px;text-align:right;white-space:nowrap;border-top:1px solid var(--line)}
th{border-top:0;color:var(--muted);font-weight:500;font-size:13px}
th:first-child,td:first-child{text-align:left;font-weight:600}
i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:7px}
i.stroke{height:0;border-top:2px solid;border-radius:0;width:14px;vertical-align:4px;background:none}
i.dashed{border-top-style:dashed}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(430px,100%),1fr));gap:14px}
figure{margin:0;padding:12px 14px 6px;min-width:0;background:var(--raised);
border:1px solid var(--line);border-radius:10px}
figcaption{font-weight:600;font-size:14px}
figcaption span{font-weight:400;color:var(--muted);font-size:13px;margin-left:12px;white-space:nowrap}
svg{display:block;width:100%;height:auto;margin-top:6px}
svg text{font-size:11px;fill:var(--muted);font-variant-numeric:tabular-nums}
.grid{stroke:var(--line);fill:none}.tick{stroke:var(--muted);fill:none}
.shaded{fill:var(--shade)}.line{fill:none;stroke-width:1.8;stroke-linejoin:round}.over{fill:none;stroke-width:4}
.rule{stroke:var(--muted);stroke-dasharray:2 3;fill:none}
.death{stroke:var(--bad);stroke-dasharray:4 3;fill:none}.cross{stroke:var(--bad);stroke-width:2;fill:none}
.hover{fill:transparent}.hover:hover{fill:var(--shade)}
details{margin-top:12px;color:var(--muted)}summary{cursor:pointer}
details ol{columns:2 420px;column-gap:32px;margin:8px 0 0;padding:0;list-style:none;font-size:13px}
details li{break-inside:avoid;padding:2px 0}details b{color:var(--text);font-weight:500;margin-right:8px}
"""


def document(title: str, facts: Sequence[str], body: str) -> str:
    """Return the document. ``facts``: sentences below the title; ``body``: HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        + "".join(f"<p>{escape(fact)}</p>" for fact in facts)
        + body
        + "</body></html>\n"
    )


def table_html(rows: Sequence[Sequence[str]], colours: Sequence[str] = ()) -> str:
    """Return a table, the head in the first row. ``colours``: CSS variables that mark the other rows."""
    head, *rest = rows
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = ""
    for number, row in enumerate(rest):
        mark = f'<i style="background:var(--{colours[number]})"></i>' if colours else ""
        others = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        body += f"<tr><td>{mark}{escape(row[0])}</td>{others}</tr>"
    return f'<div class="table"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def figure(plot: Plot, *, legend: bool = True) -> str:
    """Return a plot with its title and its legend."""
    keys = [f'<span><i style="background:var(--{a.colour})"></i>{escape(a.label)}</span>' for a in plot.areas]
    keys += [
        f'<span><i class="stroke{" dashed" if line.dashed else ""}" style="border-color:var(--{line.colour})"></i>'
        f"{escape(line.label)}</span>"
        for line in plot.lines
    ]
    if any(math.isinf(value) for line in plot.lines for value in line.values):
        keys.append("<span>line at the top: not served</span>")
    if plot.deaths_s and plot.areas:
        keys.append('<span><i class="stroke dashed" style="border-color:var(--bad)"></i>a replica dies</span>')
    shown = "".join(keys) if legend else ""
    return f"<figure><figcaption>{escape(plot.title)}{shown}</figcaption>{plot.svg()}</figure>"
