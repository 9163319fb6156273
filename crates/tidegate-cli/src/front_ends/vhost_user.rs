//! Served pools as disks of virtual machines.

use anyhow::{Context, Result};
use tidegate_serve::vhost_user::{DurableNote, Options, VhostUser};

use super::ublk::{identity_of, uuid_of};
use super::{Attached, Begun, FrontEnd, Offer, survives_a_kill};
use crate::served::Reached;

/// Disks of virtual machines.
pub(super) const FRONT_END: FrontEnd = FrontEnd {
    is_wanted: |args| args.vhost_user.is_some(),
    prepare: || {},
    expect: || Ok(()),
    attach,
};

impl Attached for VhostUser {
    fn begin_stop(&self) {
        Self::begin_stop(self);
    }

    fn durable_note(&self) -> Option<DurableNote> {
        Some(Self::durable_note(self))
    }

    fn stop(self: Box<Self>) -> Result<()> {
        drop(self);
        Ok(())
    }
}

fn attach(offer: &Offer<'_>) -> Result<Begun> {
    let plan = &offer.served.plan;
    let socket = plan.args.vhost_user.clone().context("no socket was given")?;
    let options = Options {
        socket,
        serial: serial(offer),
        identity: identity_of(&offer.served.file, offer.served.stack.description())?,
        survives_a_kill: survives_a_kill(&plan.args),
        read_only: plan.args.read_only,
        memory: offer.memory.clone(),
        log: offer.log(),
    };
    let pool = plan.pool.display();
    let disk = VhostUser::start(offer.device, &options)
        .with_context(|| format!("{pool} cannot be the disk of a virtual machine"))?;
    let reached = Reached {
        front_end: "vhost-user",
        address: disk.path().to_path_buf(),
        note: None,
        statistics: disk.statistics(),
    };
    Ok((reached, Box::new(disk)))
}

/// Returns the disk's serial number, so that a machine finds the disk again: the front of the
/// pool's UUID, or the export's name if the pool has none.
fn serial(offer: &Offer<'_>) -> String {
    let uuid = uuid_of(offer.served.stack.description());
    uuid.map_or_else(|| offer.served.plan.args.export.clone(), |uuid| uuid.replace('-', ""))
}
