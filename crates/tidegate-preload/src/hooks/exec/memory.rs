//! Memory for the length of a call, not from the heap, which a child of `vfork` must not touch.
#![allow(unsafe_code)] // mappings

use crate::sys::page::{map, unmap};

/// Words that the stack provides. A larger environment is mapped; a child of `vfork` that succeeds
/// leaves the mapping to its parent.
const STACK_WORDS: usize = 512;

/// Calls `work` with `needed_bytes` of zeroed memory, or `None` if there is none.
pub(super) fn with<R>(needed_bytes: usize, work: impl FnOnce(Option<&mut [usize]>) -> R) -> R {
    let words = needed_bytes.div_ceil(size_of::<usize>());
    if words <= STACK_WORDS { on_stack(words, work) } else { mapped(words, work) }
}

#[inline(never)]
fn on_stack<R>(words: usize, work: impl FnOnce(Option<&mut [usize]>) -> R) -> R {
    let mut memory = [0; STACK_WORDS];
    work(memory.get_mut(..words))
}

fn mapped<R>(words: usize, work: impl FnOnce(Option<&mut [usize]>) -> R) -> R {
    let len_bytes = words * size_of::<usize>();
    let Some(at) = map(len_bytes) else { return work(None) };
    #[allow(clippy::cast_ptr_alignment)] // a mapping starts at a page
    let start = at.cast::<usize>();
    // SAFETY: a new mapping of `len_bytes` zeroed bytes, which nothing else refers to.
    let memory = unsafe { std::slice::from_raw_parts_mut(start, words) };
    let result = work(Some(memory));
    unmap(at, len_bytes);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_large_memory_is_there() {
        for bytes in [0, 1, 8, 8192, 8193, 1 << 20] {
            let words = with(bytes, |memory| {
                let memory = memory.unwrap();
                memory.fill(usize::MAX);
                memory.len()
            });
            assert_eq!(words, bytes.div_ceil(8));
        }
    }
}
