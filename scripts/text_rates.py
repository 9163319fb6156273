"""Measures the language of comments and docs, and holds it to [`LIMITS`].

Rates are per 1,000 words. Each counts a way to write without naming a subject:

- `what_is`: a clause in the place of a noun ("what is there", "what was read");
- `of_which`: a clause that hangs on a preposition ("of which", "for what");
- `of_it`: a pronoun in the place of a name ("of it", "of them", "those of").

`verb_first_pct` is the share of documented functions whose comment begins with a verb ("Returns",
"Destages"). The rates of a crate are those of its comments outside of tests; those of the docs are
of README.md and docs/ without tables and code.
"""

import re

RATES = {
    "what_is": re.compile(
        r"\b[Ww]hat (is|was|were|are|has|had|it|they|the|a|one|each|there|came|became|lies|no|of|can|does|may|must|an)\b"
    ),
    "of_which": re.compile(r"\b(of|for|in|to|by|with|from|on|at) (which|what|whom)\b"),
    "of_it": re.compile(r"\b(of|for) (it|them|those)\b|\bthose of\b"),
}
VERBS = "verb_first_pct"
# The rates may be at most so high, the share of verbs at least: what the worst crate has now. A limit
# may only fall, that of verbs only rise. Well-kept projects of the field have 0.1-0.7, 0.1-0.5,
# 0.2-0.7 and 61-78.
LIMITS = {"what_is": 0.65, "of_which": 0.45, "of_it": 0.85, VERBS: 88.0}

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
    verbs = sum(bool(VERB.match(line) and not NO_VERB.match(line)) for line in first)
    return 100 * verbs / len(docs) if docs else 100


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
    """The rates of the docs and of each crate."""
    return {"docs": of_docs(paths), **by_crate(paths)}


def check(paths):
    """The rates that are beyond their limits, as lines."""
    faults = []
    for part, values in measured(paths).items():
        for name, value in values.items():
            limit = LIMITS[name]
            if name == VERBS and value < limit:
                faults.append(f"{part}: {name} is {value:.2f}; expected at least {limit}: begin docs of functions with a verb")
            elif name != VERBS and value > limit:
                faults.append(f"{part}: {name} is {value:.2f}; expected at most {limit}: name subjects, and use active verbs")
    return sorted(faults)


def printed(paths):
    """The present rates, a line for each part."""
    parts = sorted(measured(paths).items())
    return "\n".join(f"{part}: " + ", ".join(f"{name} {value:.2f}" for name, value in values.items()) for part, values in parts)
