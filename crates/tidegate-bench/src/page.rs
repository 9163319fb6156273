//! The frame of a static page: one file without external parts, light and dark, for desktop and
//! phone.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::look::{colors, patterns};

const STYLE: &str = "\
:root{color-scheme:light dark;--page:#fff;--ink:#1c2127;--soft:#59636e;--rule:#d3d9df;--box:#f4f6f8}\
@media(prefers-color-scheme:dark){:root{--page:#14181d;--ink:#e4e9ee;--soft:#9aa5b1;--rule:#39424d;\
--box:#1d232a}}\
*{box-sizing:border-box}\
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1120px;padding:1.2em 1em 3em;\
background:var(--page);color:var(--ink);overflow-wrap:break-word}\
h1{font-size:1.6em;line-height:1.25;margin:.2em 0 .5em}h2{font-size:1.2em;margin:2em 0 .4em}\
p{max-width:75ch}\
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;display:block;\
overflow-x:auto;max-width:100%;margin-top:1em}\
td,th{padding:.3em .7em;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap}\
th{color:var(--soft);font-weight:600}\
td:first-child,th:first-child{text-align:left}\
pre{background:var(--box);border:1px solid var(--rule);border-radius:6px;padding:.7em .9em;\
white-space:pre-wrap;font-size:13px;max-width:100%}\
.verdict{background:var(--box);border-left:4px solid var(--ink);padding:.7em 1em;margin:1em 0;\
font-size:1.05em;max-width:75ch}\
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr));gap:1.6em}\
figure{margin:0;min-width:0;max-width:560px}figcaption{font-weight:600;font-size:14px}\
figure svg.plot{display:block;width:100%;height:auto}\
svg text{fill:var(--ink);font:12px system-ui,sans-serif}svg text.soft{fill:var(--soft)}\
.grid{stroke:var(--rule);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}\
.line{fill:none;stroke:var(--c);stroke-width:2}\
.mark{fill:var(--c);stroke:var(--c);stroke-width:1.6}.hollow{fill:var(--page)}\
.dots{fill:none;stroke:var(--c);stroke-width:3;stroke-linecap:round}\
.bar{fill:var(--c)}.hatch{fill:none;stroke:var(--page);stroke-width:1.4;stroke-linecap:round}\
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.15em 1.1em;margin:.2em 0 0;padding:0;\
font-size:13px}.legend li{display:flex;align-items:center;gap:.4em}\
.legend svg{flex:none;width:38px;height:14px}\
.plain{--c:var(--soft)}.patterns{position:absolute;width:0;height:0}\
@media(max-width:500px){svg text{font-size:14px}}\
@media print{body{max-width:none}figure,tr{break-inside:avoid}}";

/// Renders a page with `body` as all of its text.
pub fn page(title: &str, body: &Markup) -> String {
    let dark = format!("@media(prefers-color-scheme:dark){{{}}}", colors(true));
    let style = [STYLE, &colors(false), &dark].concat();
    let markup = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width,initial-scale=1";
                title { (title) }
                style { (PreEscaped(style)) }
            }
            body {
                svg.patterns aria-hidden="true" { defs { (PreEscaped(patterns())) } }
                (body)
            }
        }
    };
    markup.into_string()
}
