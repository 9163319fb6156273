//! The commands as a user meets them: what they print, what they refuse, what servers of each
//! engine do. One program for all tests, which is linked once.

#[path = "../support/behind.rs"]
mod behind;
#[path = "../support/nbd.rs"]
mod nbd;
#[path = "../support/pmemblk.rs"]
mod pmemblk;
#[path = "../support/mod.rs"]
mod support;

mod bad_devices;
mod cache_device;
mod cache_lifecycle;
mod cli;
mod config;
mod control;
mod damaged_log;
mod dependencies;
mod docs;
mod doctor;
mod install;
mod keep_dirty;
mod killed_cache;
mod libpmemblk;
mod list;
mod log_device;
mod memory;
mod messages;
mod metrics;
mod nbd_answers;
mod nbd_backing;
mod other_writers;
mod pages;
mod purge;
mod reload;
mod reset;
mod scarce;
mod service;
mod signals;
mod snapshot;
mod stop;
mod top;
mod vhost_user;
