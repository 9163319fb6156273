"""Measures the language of comments and docs, and holds it to the limits of scripts/text-limits.toml.

Rates are per 1,000 words. Each counts a way to write without naming a subject:

- `what_is`: a clause in the place of a noun ("what is there", "what was read");
- `of_which`: a clause that hangs on a preposition ("of which", "for what");
- `of_it`: a pronoun in the place of a name ("of it", "of them", "those of").

`verb_first_pct` is the share of documented functions whose comment begins with a verb ("Returns",
"Destages"). The rates of a crate are those of its comments outside of tests; those of the docs are
of README.md and docs/ without tables and code. A limit may only fall, that of `verb_first_pct` only
rise.
"""

import math
import re
import tomllib

LIMITS = "scripts/text-limits.toml"
RATES = {
    "what_is": re.compile(
        r"\b[Ww]hat (is|was|were|are|has|had|it|they|the|a|one|each|there|came|became|lies|no|of|can|does|may|must|an)\b"
    ),
    "of_which": re.compile(r"\b(of|for|in|to|by|with|from|on|at) (which|what|whom)\b"),
    "of_it": re.compile(r"\b(of|for) (it|them|those)\b|\bthose of\b"),
}
VERBS = "verb_first_pct"
# How far a rate has to be below its limit until a lower one is proposed.
MARGIN = {VERBS: 1.0}

TEST_FILE = re.compile(r"/tests/|(^|/|_)tests?\.rs$|/benches/")
TEST_MODULE = re.compile(r"#\[cfg\((?:all\()?test[^\n]*\]\s*mod \w+ \{")
COMMENT = re.compile(r"^\s*//[/!]?\s?(.*)$", re.M)
DOCUMENTED = re.compile(
    r"((?:^[ \t]*///[^\n]*\n)+)(?:[ \t]*#\[[^\n]*\n)*[ \t]*(?:pub(?:\([^)]*\))? )?"
    r"(?:async |const |unsafe |extern \"[^\"]*\" )*fn ",
    re.M,
)
VERB = re.compile(r"[A-Z][a-z]+(s|es)\b")
# Words that end as a verb does.
NO_VERB = re.compile(
    r"(This|Whether|As|Has|Is|Pages|Bytes|Files|Slots|Blocks|Records|Ids|Names|Numbers|Sectors|Docs|Errors|Panics)\b"
)
GENERATED = re.compile(r"<!-- table.*?<!-- end -->", re.S)
FENCED = re.compile(r"```.*?```", re.S)
TABLE_OR_CODE = re.compile(r"^(\||    ).*$", re.M)


def rates(text):
    text = " ".join(text.split())
    words = max(1, len(text.split()))
    return {name: len(pattern.findall(text)) * 1000 / words for name, pattern in RATES.items()}


def verb_first_pct(sources):
    docs = [match.group(1) for source in sources for match in DOCUMENTED.finditer(source)]
    first = [re.sub(r"^\s*///\s?", "", doc.split("\n")[0]) for doc in docs]
    return 100 * sum(bool(VERB.match(line) and not NO_VERB.match(line)) for line in first) / max(1, len(docs))


def product(source):
    """The source of a file up to the module of its tests."""
    module = TEST_MODULE.search(source)
    return source[: module.start()] if module else source


def by_crate(paths):
    crates = {}
    for path in paths:
        if path.suffix == ".rs" and path.parts[0] == "crates" and not TEST_FILE.search(str(path)):
            crates.setdefault(path.parts[1], []).append(product(path.read_text(errors="replace")))
    return {
        crate: {
            **rates(" ".join(comment for source in sources for comment in COMMENT.findall(source))),
            VERBS: verb_first_pct(sources),
        }
        for crate, sources in crates.items()
    }


def of_docs(paths):
    pages = [path for path in paths if path.suffix == ".md" and (path.parts[0] == "docs" or str(path) == "README.md")]
    text = "\n".join(path.read_text() for path in pages)
    for pattern in (GENERATED, FENCED, TABLE_OR_CODE):
        text = pattern.sub(" ", text)
    return rates(text)


def measured(paths):
    """The rates of the docs and of each crate, by the names of their tables in the file of limits."""
    return {"docs": of_docs(paths), **by_crate(paths)}


def rounded(name, value):
    """A value as the limit that it just keeps."""
    return math.floor(value * 10) / 10 if name == VERBS else math.ceil(value * 100 - 1e-9) / 100


def check(paths):
    """What is above its limit, as lines; and limits that can be lowered, as lines."""
    with open(LIMITS, "rb") as file:
        limits = tomllib.load(file)
    values, faults, hints = measured(paths), [], []
    for part in values.keys() ^ limits.keys():
        faults.append(f"{LIMITS}: {part} has {'no code' if part in limits else 'no limits'}; `check-text --rates` prints all")
    for part in values.keys() & limits.keys():
        for name, value in values[part].items():
            limit, may_rise = limits[part].get(name), name == VERBS
            if limit is None:
                faults.append(f"{LIMITS}: {part} has no {name}; expected {rounded(name, value)}")
                continue
            better = value - limit if may_rise else limit - value
            if better < -1e-9:
                bound, advice = ("least", "begin more docs of functions with a verb") if may_rise else ("most", "name subjects, and use active verbs")
                faults.append(f"{part}: {name} is {value:.2f}; expected at {bound} {limit}: {advice}")
            elif better >= MARGIN.get(name, 0.25):
                hints.append(f"{LIMITS}: {part}: {name} is {value:.2f}: the limit {limit} can become {rounded(name, value)}")
    return sorted(faults), sorted(hints)


def as_limits(paths):
    """The present values in the form of the file of limits."""
    tables = []
    for part, values in sorted(measured(paths).items(), key=lambda table: (table[0] != "docs", table[0])):
        tables.append("\n".join([f"[{part}]", *(f"{name} = {rounded(name, value)}" for name, value in values.items())]))
    return "\n\n".join(tables)
