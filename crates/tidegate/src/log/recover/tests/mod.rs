//! Recovery against models, on files in memory and on those of this machine.

mod dates;
mod left;
mod names;
mod planning;
mod pool;

use proptest::collection::vec;
use proptest::prelude::*;

use super::fuzzing;
use super::plan::{FilePlan, Operation, Step};
use crate::log::FileHandle;

/// Makes a file with these operations. The first `marked` ones are promised.
pub(super) fn file_of(operations: &[Operation], marked: u64) -> FilePlan {
    let steps = (0..).zip(operations);
    FilePlan {
        id: 1,
        identity: 1,
        file_system: [1; 16],
        handle: FileHandle::NONE,
        device: 1,
        paths: vec![b"/file".to_vec()],
        steps: steps.map(|(position, &operation)| Step { position, operation }).collect(),
        marked_until: marked,
        damaged: None,
        made: None,
        has_lost_make: false,
        modified_until_ns: None,
        changed_ns: 0,
        begun: None,
    }
}

proptest! {
    #[test]
    fn p7_logs_of_any_records_give_plans_and_decisions(bytes in vec(any::<u8>(), 0..400)) {
        fuzzing::patched_pool(&[&[255, 0][..], &bytes].concat());
    }
}
