//! Globs of paths, as on the command line of `tidegate run`, matched without heap memory.
//!
//! `*` matches any bytes and `?` one byte, slashes too; `[a-z]` and `[!a-z]` match one byte, `\`
//! takes the next byte literally. A glob that matches a directory matches everything below it.
//!
//! Entry points: [`Filter`] · [`matches_any`].

/// The paths that the user wants in the log.
#[derive(Debug, Clone, Copy, Default)]
pub struct Filter {
    /// Globs, one a line. A path has to match at least one; empty: no restriction.
    pub include: &'static [u8],
    /// Globs, one a line. None may match.
    pub exclude: &'static [u8],
}

impl Filter {
    /// Returns whether the filter admits every path.
    pub fn admits_all(&self) -> bool {
        globs(self.include).chain(globs(self.exclude)).next().is_none()
    }

    /// Returns whether the filter admits files of this path to the log.
    pub fn admits(&self, path: &[u8]) -> bool {
        let included = globs(self.include).next().is_none() || matches_any(self.include, path);
        included && !matches_any(self.exclude, path)
    }
}

fn globs(lines: &[u8]) -> impl Iterator<Item = &[u8]> {
    lines.split(|byte| *byte == b'\n').filter(|glob| !glob.is_empty())
}

/// Returns whether one of the globs, one a line, matches the path or a directory above it.
pub fn matches_any(lines: &[u8], path: &[u8]) -> bool {
    globs(lines).any(|glob| matches(glob, path))
}

/// Returns whether the glob matches the path or a directory above it.
///
/// A mismatch backtracks to the last `*` only: a later `*` can match all that an earlier one could.
fn matches(glob: &[u8], path: &[u8]) -> bool {
    let (mut glob_at, mut path_at) = (0, 0);
    let mut star = None;
    loop {
        let rest = &glob[glob_at..];
        if rest.is_empty() && matches!(path.get(path_at), None | Some(b'/')) {
            return true;
        }
        if rest.first() == Some(&b'*') {
            glob_at += 1;
            star = Some((glob_at, path_at));
        } else if let Some(taken) = one(rest, path.get(path_at)) {
            (glob_at, path_at) = (glob_at + taken, path_at + 1);
        } else if let Some((after, from)) = star.filter(|(_, from)| *from < path.len()) {
            star = Some((after, from + 1));
            (glob_at, path_at) = (after, from + 1);
        } else {
            return false;
        }
    }
}

/// Returns how many bytes of the glob match this byte of the path, or `None` if none match.
fn one(glob: &[u8], byte: Option<&u8>) -> Option<usize> {
    let byte = *byte?;
    match glob {
        [b'?', ..] => Some(1),
        [b'\\', literal, ..] => (*literal == byte).then_some(2),
        [b'[', ..] => match class(glob, byte) {
            Class::Matches(taken) => Some(taken),
            Class::Differs => None,
            Class::Unclosed => (byte == b'[').then_some(1),
        },
        [literal, ..] => (*literal == byte).then_some(1),
        [] => None,
    }
}

/// How a class at the start of a glob treats a byte.
enum Class {
    /// The byte is in the class, which takes so many bytes of the glob.
    Matches(usize),
    /// The byte is not in the class.
    Differs,
    /// The closing bracket is missing, so that this is no class.
    Unclosed,
}

fn class(glob: &[u8], byte: u8) -> Class {
    let negated = matches!(glob.get(1), Some(b'!' | b'^'));
    let start = 1 + usize::from(negated);
    // A bracket that comes first is a member.
    let closing = |at: &u8| *at == b']';
    let Some(inside) = glob.get(start + 1..).and_then(|rest| rest.iter().position(closing)) else {
        return Class::Unclosed;
    };
    let end = start + 1 + inside;
    let (mut at, mut found) = (start, false);
    while at < end {
        let is_range = at + 2 < end && glob[at + 1] == b'-';
        let last = if is_range { glob[at + 2] } else { glob[at] };
        found |= (glob[at]..=last).contains(&byte);
        at += if is_range { 3 } else { 1 };
    }
    if found == negated { Class::Differs } else { Class::Matches(end + 1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_as_shells_do() {
        let cases = [
            ("/a/b", "/a/b", true),
            ("/a/b", "/a/b/c", true),
            ("/a/b", "/a/bc", false),
            ("/a/*", "/a/b", true),
            ("/a/*.db", "/a/x.db", true),
            ("/a/*.db", "/a/x/y.db", true),
            ("/a/*.db", "/a/x/y.dbx", false),
            ("/**/x*z", "/a/b/xyyz", true),
            ("/**/x*z", "/a/b/xyy", false),
            ("/a?c", "/abc", true),
            ("/a?c", "/a/c", true),
            ("/[a-c][!x]", "/by", true),
            ("/[a-c][!x]", "/bx", false),
            ("/[]]", "/]", true),
            ("/[ab", "/[ab", true),
            ("/\\*", "/*", true),
            ("/\\*", "/x", false),
            ("**", "/any/thing", true),
            ("/*a*b*c", "/xaxbxbxc", true),
            ("/**a/*b", "/xa/ya/zb", true),
        ];
        for (glob, path, expected) in cases {
            assert_eq!(matches(glob.as_bytes(), path.as_bytes()), expected, "{glob} on {path}");
        }
    }

    #[test]
    fn many_stars_do_not_take_exponential_time() {
        let glob = b"/*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*b".as_slice();
        assert!(!matches(glob, &[b"/".as_slice(), &[b'a'; 4000]].concat()));
    }

    #[test]
    fn a_filter_includes_then_excludes() {
        let filter = Filter { include: b"/data\n/srv/*.db", exclude: b"/data/tmp" };
        assert!(filter.admits(b"/data/x") && filter.admits(b"/srv/x.db"));
        assert!(!filter.admits(b"/data/tmp/x") && !filter.admits(b"/home/x"));
        assert!(Filter::default().admits(b"/anything"));
    }
}
