//! The command line, as docs/operations/ describes it. Names here are a contract with scripts.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use clap::{Arg, ArgMatches, Args, FromArgMatches, Parser, Subcommand, ValueEnum};
use tidegate::backing::BackingUrl;
use tidegate::cache::{check_atomic_mode, check_mode};
use tidegate::dram::{Policy, TierSpec};
use tidegate::opening;
use tidegate::pmem::{Domain, MediaModel, RegionOptions};
use tidegate::size::Size;
use tidegate::stack::{REGISTRY, StackError};
use tidegate::tier::{Engine, Options, SettingError};
use tidegate_serve::nbd::ListenAddress;

use crate::log::{Format, Level};

/// Durable writes on persistent memory: for programs as they are, or as crash-safe block devices
/// for this machine, for virtual machines and over NBD.
#[derive(Debug, Parser)]
#[command(name = "tidegate", version, propagate_version = true, arg_required_else_help = true)]
#[command(
    after_help = "Examples: on any machine, without waiting for a disk (a power cut loses what was synced):
  tidegate run --volatile -- sqlite3 app.db 'create table if not exists t(n)'
  tidegate create /dev/shm/pool --engine btt --size 256M
  tidegate check /dev/shm/pool

Examples: with persistent memory at /mnt/pmem:
  tidegate run --pool /mnt/pmem/app.pool -- sqlite3 app.db
  tidegate create /mnt/pmem/pool --engine btt --size 8G
  tidegate serve /mnt/pmem/pool --nbd unix:/run/tidegate.sock

`tidegate help backings` lists the devices that can be behind a pool.

Exit status: 0 done; 1 it failed, or check found damage; 2 wrong usage."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The memory under a pool.
#[derive(Debug, Clone, PartialEq, Args)]
#[command(next_help_heading = "Memory")]
pub(crate) struct MemoryArgs {
    /// What makes a store durable: adr (write back, fence), eadr (fence), msync, or volatile
    /// (nothing does); by default chosen by the kind of the pool's file
    #[arg(long, value_name = "adr|eadr|msync|volatile")]
    pub(crate) domain: Option<Domain>,
    /// Be as slow as this medium: dram (no delay), optane, cxl, or custom; details may follow, as
    /// in `optane,write_latency_ns=80`
    #[arg(long, value_name = "MODEL", default_value = "dram")]
    pub(crate) media: MediaModel,
}

impl MemoryArgs {
    /// Returns the options of a region from these arguments.
    pub(crate) fn region_options(&self) -> RegionOptions {
        let (domain, media) = (self.domain, self.media.clone());
        RegionOptions { domain, media, ..RegionOptions::default() }
    }
}

/// The subcommands of this release.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Make a pool: a block device on persistent memory, a cache, or a log
    Create(CreateArgs),
    /// Describe a pool
    Info(InfoArgs),
    /// Look for damage in a pool, and repair it
    Check(CheckArgs),
    /// Make a pool of libpmemblk a btt pool, in place
    Convert(ConvertArgs),
    /// Serve a pool, or several, as network block devices (NBD), block devices of this machine, or
    /// disks of virtual machines
    Serve(Box<ServeArgs>),
    /// Make a pool a block device of this machine, by a server in the background
    Attach(AttachArgs),
    /// End the server of a pool that is a block device, or delete the device that a server left
    Detach(DetachArgs),
    /// Look for faults in a file for `serve --config`
    Config {
        #[command(subcommand)]
        command: ConfigCommand,
    },
    /// Run a program whose syncs cost an append to a log
    Run(RunArgs),
    /// Restore files, or the backing, from a pool after a kill or a power cut
    Recover(RecoverArgs),
    /// Write data that only a pool holds to the files' disks or to the backing, and wait for that
    Flush(FlushArgs),
    /// Describe a pool, and show the counts of the server or the supervisor that has it open
    Stat(StatArgs),
    /// List the served pools of this machine, with those that are down
    List(ListArgs),
    /// Look for the parts of this machine that the commands need, and name the missing ones
    Doctor(DoctorArgs),
    /// Have servers read their configuration file again: devices come, go and change
    Reload(ReloadArgs),
    /// Copy a served pool, or its backing, as it is at one instant
    Snapshot(SnapshotArgs),
    /// Watch the work of a pool's server on a terminal
    Top(TopArgs),
    /// Change a setting of a served pool, or of a cache pool
    Set(SetArgs),
    /// The devices that can be behind a pool; `tidegate help backings` lists them too
    #[command(hide = true, override_help = crate::commands::backings::help())]
    Backings,
    /// Write man pages and completions, made from these help texts; for `make install`
    #[command(hide = true)]
    Pages(PagesArgs),
    /// The process that owns a log pool; started by `run`
    #[command(hide = true)]
    Supervise(SuperviseArgs),
    /// Measure Tidegate beside its peers on this machine; `tidegate bench --help` tells what
    #[command(after_help = "Examples:
  tidegate bench block --threads 1,2
  tidegate bench nbd --policies btt,peer:nbdkit-memory --iodepth 32")]
    Bench(HandedArgs),
    /// Play a trace of your workload through Tidegate's tiers, and choose; `tidegate replay --help`
    /// tells how
    #[command(after_help = "Examples:
  tidegate replay app.strace --schemes dram,sccm,afcm,tidegate --pmem 10
  tidegate replay app.csv.zst --report out")]
    Replay(HandedArgs),
    /// Make a trace of a running program, for `tidegate replay`; `tidegate record --help` tells how
    #[command(after_help = "Examples:
  tidegate record -- sqlite3 app.db
  tidegate record -o build.csv.zst --include '/home/*' -- make")]
    Record(HandedArgs),
    /// Model a machine with many cores in virtual time; `tidegate model --help` tells how
    #[command(after_help = "Examples:
  tidegate model --cores 36 --policies btt,transit,pmbd --iodepth 1,128")]
    Model(HandedArgs),
}

/// Arguments for a program beside this one.
#[derive(Debug, Args)]
#[command(disable_help_flag = true, disable_version_flag = true)]
pub(crate) struct HandedArgs {
    /// What to do, and how: handed to `tidegate-bench` or `tidegate-replay`, the program beside
    /// this one that does it
    #[arg(
        value_name = "ARG",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub(crate) args: Vec<OsString>,
}

/// Arguments of `tidegate create`.
#[derive(Debug, Args)]
#[command(after_help = "Examples: on any machine:
  tidegate create /dev/shm/trial --engine btt --size 256M --domain volatile

Examples: with persistent memory at /mnt/pmem or /dev/dax0.0:
  tidegate create /mnt/pmem/pool --engine btt --size 8G
  tidegate create /dev/dax0.0 --engine btt --size 16G --btt-version 2.0
  tidegate create /mnt/pmem/app.pool --engine log --size 4G
  tidegate create /mnt/pmem/cache --engine cache --size 8G

A pool is a file on a DAX file system, a devdax character device, or any ordinary file, where each \
write waits for the disk (domain msync); on tmpfs, for trials, a power cut loses it. An engine \
`btt` writes each block all or not at all and is bit-compatible with the Linux kernel's BTT; `raw` \
is the bare memory: a crash may tear the blocks that were being written. `cache` keeps hot data of \
a slower disk, which `serve --backing` names, and makes its writes durable. `log` does so for \
writes alone; `tidegate run` also makes one by itself.")]
pub(crate) struct CreateArgs {
    /// The pool's file or devdax device
    pub(crate) pool: PathBuf,
    /// What keeps data in the pool
    #[arg(long, value_name = "ENGINE", value_parser = parse_engine, help = engine_help())]
    pub(crate) engine: &'static dyn Engine,
    /// Size of the pool: bytes, or with K, M, G or T (powers of 1024)
    #[arg(long, value_name = "SIZE")]
    pub(crate) size: Size,
    /// Overwrite the file, also if it holds a pool or a file system
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) options: EngineArgs,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
}

/// The options of all engines, as the registry lists them.
#[derive(Debug, Clone, Default)]
pub(crate) struct EngineArgs {
    /// Those that were given.
    pub(crate) given: Options,
}

impl FromArgMatches for EngineArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = REGISTRY.options().into_iter().filter_map(|(spec, _)| {
            Some((spec.name, matches.get_one::<String>(spec.name)?.clone()))
        });
        Ok(Self { given: given.collect() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for EngineArgs {
    fn augment_args(command: clap::Command) -> clap::Command {
        REGISTRY.options().into_iter().fold(command, |command, (spec, engines)| {
            let help = format!("{} ({})", spec.help, engines.join(", "));
            let arg = Arg::new(spec.name).long(spec.name).value_name(spec.value_name).help(help);
            command.arg(arg.help_heading("Engine options"))
        })
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

/// Lists the engines of the registry with a description of each.
fn engine_help() -> String {
    let engines = REGISTRY.engines().iter();
    let known: Vec<_> =
        engines.map(|it| format!("{} ({})", it.name(), it.traits().about)).collect();
    format!("What keeps data in the pool: {}", known.join(", "))
}

fn parse_engine(name: &str) -> Result<&'static dyn Engine, String> {
    REGISTRY.engine(name).map_err(|error| error.to_string())
}

/// Arguments of `tidegate info`.
#[derive(Debug, Args)]
#[command(after_help = "Examples: of a pool at /mnt/pmem:
  tidegate info /mnt/pmem/pool
  tidegate info /mnt/pmem/pool --json | jq .size_bytes
  tidegate info /mnt/pmem/pool --dram transit:512M")]
pub(crate) struct InfoArgs {
    /// The pool's file or devdax device
    pub(crate) pool: PathBuf,
    /// Show also such a write cache before the pool: slots, sets, and their cost in DRAM
    #[arg(long, value_name = "POLICY:SIZE", default_value = "none")]
    pub(crate) dram: TierSpec,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
}

/// Arguments of `tidegate check`.
#[derive(Debug, Args)]
#[command(after_help = "Examples: of a pool at /mnt/pmem:
  tidegate check /mnt/pmem/pool
  tidegate check /mnt/pmem/pool --repair

Prints a line for each finding. The pool must not be in use. Without --repair nothing is written. \
Exit status: 0 the pool is whole (or was made so by --repair); 1 it is damaged.")]
pub(crate) struct CheckArgs {
    /// The pool's file or devdax device
    pub(crate) pool: PathBuf,
    /// Repair everything that the pool itself proves: info blocks, superblocks, headers, tail and
    /// limit of a log from their other copy; entries of a BTT's map and flog from its other parts;
    /// one changed bit in the header of a record or a slot
    #[arg(long)]
    pub(crate) repair: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
}

/// Arguments of `tidegate convert`.
#[derive(Debug, Args)]
#[command(after_help = "Examples: of a pool at /mnt/pmem:
  tidegate convert /mnt/pmem/blocks

A pool of libpmemblk (PMDK 1.x) need not be converted: `tidegate serve` serves it as it is, and \
libpmemblk can open it afterwards. A converted pool is a BTT of version 1.1, which the Linux kernel \
knows and libpmemblk does not. No data is copied: only headers are written. The blocks must have 512 \
or 4096 bytes, and the pool must not be in use. A conversion that was cut off is completed by the \
same command.")]
pub(crate) struct ConvertArgs {
    /// The pool's file or devdax device
    pub(crate) pool: PathBuf,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
}

/// Arguments of `tidegate serve`.
#[derive(Debug, Args)]
#[command(after_help = "Examples: of a pool at /mnt/pmem:
  tidegate serve /mnt/pmem/pool --nbd unix:/run/tidegate.sock
  tidegate serve /mnt/pmem/pool --nbd tcp:0.0.0.0:10809 --export db \\
    --tls require --tls-cert server.pem --tls-key server.key --tls-ca ca.pem
  tidegate serve /mnt/pmem/pool --nbd tcp:127.0.0.1:10809 --read-only
  tidegate serve /mnt/pmem/pool --ublk
  tidegate serve /mnt/pmem/pool --vhost-user unix:/run/vm.sock
  tidegate serve /mnt/pmem/pool --nbd unix:/run/pool.sock --dram transit:512M
  tidegate serve /mnt/pmem/log --nbd unix:/run/tidegate.sock --backing /srv/img
  tidegate serve /mnt/pmem/cache --nbd unix:/run/cache.sock \\
    --backing /srv/img --keep-dirty
  tidegate serve --config /etc/tidegate/tidegate.toml

The last line printed at start is `ready`; clients may connect from then on. SIGTERM and SIGINT \
stop the server after it has finished what it accepted, written the DRAM tier back, and written \
what a log or a cache has for the backing to that, unless --keep-dirty is given.")]
pub(crate) struct ServeArgs {
    /// The pool's file or devdax device
    #[arg(value_name = "POOL", required_unless_present = "config")]
    pub(crate) pool: Option<PathBuf>,
    /// Take pools, addresses and all options from this TOML file, which may name several pools;
    /// `tidegate config check FILE` lists its faults
    #[arg(long, value_name = "FILE", exclusive = true)]
    pub(crate) config: Option<PathBuf>,
    /// Where to listen; `systemd` for the sockets that systemd passes; may be repeated
    #[arg(
        long,
        value_name = "unix:PATH|tcp:HOST:PORT|systemd",
        required_unless_present_any = ["config", "ublk", "vhost_user"]
    )]
    pub(crate) nbd: Vec<ListenAddress>,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    /// Show the metrics to Prometheus here, at /metrics; all that reach the address can read them
    #[arg(long, value_name = "tcp:HOST:PORT|unix:PATH")]
    pub(crate) metrics: Option<ListenAddress>,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    #[command(flatten)]
    pub(crate) limits: LimitArgs,
    #[command(flatten)]
    pub(crate) log: LogArgs,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    /// Leave the terminal and the parent once the server is ready, and log to the kernel's log
    #[arg(long, hide = true)]
    pub(crate) detached: bool,
}

/// One device of `tidegate serve`: the export, the tiers before the pool, and the backing.
#[derive(Debug, Clone, PartialEq, Args)]
#[expect(clippy::struct_excessive_bools, reason = "switches of a command line")]
#[expect(clippy::option_option, reason = "an option with a value that may be left out")]
pub(crate) struct DeviceArgs {
    /// Name of the export; clients that ask for no name get it too
    #[arg(long, value_name = "NAME", default_value = "")]
    pub(crate) export: String,
    /// Make the pool a block device of this machine, /dev/ublkbN, by the kernel's ublk driver (as
    /// root): the one that an earlier server of the pool left, or a new one, whose number the
    /// kernel chooses unless it is given
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true)]
    pub(crate) ublk: Option<Option<u32>>,
    /// Make the pool the disk of a virtual machine, whose monitor (QEMU, libvirt, Cloud Hypervisor)
    /// connects to this socket by vhost-user-blk
    #[arg(long, value_name = "unix:PATH", value_parser = parse_socket)]
    pub(crate) vhost_user: Option<PathBuf>,
    /// Write cache in DRAM before the pool: transit, transit-no-eager, transit-no-bypass, pmbd,
    /// pmbd70, lru or coactive, with its size; its data becomes durable at the next flush, FUA or
    /// SIGTERM
    #[arg(long, value_name = "POLICY:SIZE", default_value = "none")]
    pub(crate) dram: TierSpec,
    /// With a log or cache pool: the device behind it, such as a file, a block device or an export
    /// of an NBD server; `tidegate help backings` lists all. It has the export's size, and gets the
    /// pool's data
    #[arg(long, value_name = "URL|PATH")]
    pub(crate) backing: Option<BackingUrl>,
    /// With a cache pool: wb (write-back), wt (write-through), wa (write-around), wi
    /// (write-invalidate), wo (write-only) or pt (pass-through); the one it had last unless given
    #[arg(long, value_name = "MODE", value_parser = parse_mode)]
    pub(crate) mode: Option<String>,
    /// With a cache pool in mode wb or wo: after a crash the export is as it was at a flush, so
    /// that the writes of one flush are there as a whole or not at all. Writes are durable at the
    /// next flush
    #[arg(long)]
    pub(crate) atomic_flush: bool,
    /// With a log or cache pool: leave data that the backing lacks in the pool when the server is
    /// stopped, which then waits for no write to the backing. All that was acknowledged is durable;
    /// `tidegate flush` writes it to the backing
    #[arg(long)]
    pub(crate) keep_dirty: bool,
    /// Destage data that the pool holds for another backing to this one: for a copy, or a disk that
    /// changed its name. Also use a backing that holds a pool, which is lost. Without a backing:
    /// write to a pool also where `check` finds that one write may destroy another block
    #[arg(long)]
    pub(crate) force: bool,
    /// Refuse writes
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Answer `tidegate stat` and `tidegate set` at this socket too; they find the server by its
    /// pool without it
    #[arg(long, value_name = "unix:PATH", value_parser = parse_unix)]
    pub(crate) control: Option<PathBuf>,
    /// Delay each request by so many microseconds: for tests and demonstrations
    #[arg(long, value_name = "MICROSECONDS", hide = true)]
    pub(crate) delay_us: Option<u64>,
}

impl DeviceArgs {
    /// Returns the sockets of the device alone.
    pub(crate) fn sockets(&self) -> Vec<ListenAddress> {
        let paths = [&self.control, &self.vhost_user];
        paths.into_iter().flatten().cloned().map(ListenAddress::Unix).collect()
    }

    /// Returns the faults of a device that no pool could have, each with the key of one option.
    pub(crate) fn contradictions(&self) -> Vec<(&'static str, String)> {
        let of_backed_pools = [
            ("mode", self.mode.is_some()),
            ("atomic-flush", self.atomic_flush),
            ("keep-dirty", self.keep_dirty),
        ];
        let has_backing = self.backing.is_some();
        let lack = of_backed_pools.into_iter().filter(|(_, is_given)| *is_given && !has_backing);
        let lack = lack.map(|(key, _)| {
            (
                key,
                format!("`{key}` is for pools with a backing: say `backing` too, or leave it out"),
            )
        });
        let is_read_only = (self.read_only && has_backing).then(|| {
            let text = "a pool with a `backing` cannot be served `read-only`: the backing may lack \
                        what the pool holds";
            ("read-only", text.to_owned())
        });
        let atomic_below = self.atomic_flush && self.dram.policy != Policy::None;
        let atomic_below =
            atomic_below.then(|| ("atomic-flush", StackError::NotBelowDram.to_string()));
        let mode = self.mode.as_ref().filter(|_| self.atomic_flush);
        let mode = mode.and_then(|mode| check_atomic_mode(mode).err());
        let mode = mode.map(|error| ("mode", format!("`mode`: {error}")));
        lack.chain(is_read_only).chain(atomic_below).chain(mode).collect()
    }
}

/// Transport security of `tidegate serve`.
#[derive(Debug, Args)]
#[command(next_help_heading = "TLS")]
pub(crate) struct TlsArgs {
    /// Refuse clients without TLS (`require`), or serve them in the clear too (`allow`)
    #[arg(long, value_name = "WHEN", requires = "tls_cert", requires = "tls_key")]
    pub(crate) tls: Option<TlsWhen>,
    /// The server's certificate chain, PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// The server's private key, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Demand client certificates signed by these authorities, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_ca: Option<PathBuf>,
}

/// Values of `--tls`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TlsWhen {
    /// Clients without TLS are refused
    Require,
    /// Clients without TLS are served in the clear
    Allow,
}

/// Limits of `tidegate serve`.
#[derive(Debug, Args)]
#[command(next_help_heading = "Limits")]
pub(crate) struct LimitArgs {
    /// Most connections at once; at the limit a new client takes the place of an idle one
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub(crate) max_connections: Option<NonZeroUsize>,
    /// Most memory for the requests of all clients: bytes, or with K, M, G or T; at least 64M; by
    /// default a quarter of the memory of this machine or control group
    #[arg(long, value_name = "SIZE")]
    pub(crate) request_memory: Option<Size>,
    /// How long a stop may take, from SIGTERM or SIGINT on: then the server ends although data is
    /// not yet written back, says which data stays in the pool, and exits with status 1. A second
    /// signal leaves it 5 seconds
    #[arg(long, value_name = "SECONDS", default_value_t = STOP_TIMEOUT_SECONDS)]
    pub(crate) stop_timeout: u32,
}

/// The default of `--stop-timeout`: the time after which systemd kills the server.
pub(crate) const STOP_TIMEOUT_SECONDS: u32 = 90;

/// Log messages of `tidegate serve` on standard error.
#[derive(Debug, Args)]
#[command(next_help_heading = "Log")]
pub(crate) struct LogArgs {
    /// Lines for people, with the time where standard error is a file; or a JSON object a line
    #[arg(long, value_name = "text|json", default_value = "text", hide_possible_values = true)]
    pub(crate) log_format: Format,
    /// The least severe messages to print: of loss or failure (error), of a possible failure
    /// (warning), or of any event (info)
    #[arg(
        long,
        value_name = "error|warning|info",
        default_value = "info",
        hide_possible_values = true
    )]
    pub(crate) log_level: Level,
}

/// Subcommands of `tidegate config`.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Print each fault of the file with its line and column
    #[command(after_help = "Examples:
  tidegate config check /etc/tidegate/tidegate.toml

Nothing is opened: of pools, backings and TLS files only the kind is looked at, and `serve` looks \
at the rest. Exit status: 0 nothing is wrong; 1 something is.")]
    Check {
        /// The file
        file: PathBuf,
    },
}

/// Arguments of `tidegate run`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples: on any machine, without waiting for a disk (a power cut loses what was synced):
  tidegate run --volatile -- sqlite3 app.db 'create table if not exists t(n)'

Examples: with persistent memory at /mnt/pmem:
  tidegate run --pool /mnt/pmem/app.pool -- sqlite3 app.db
  tidegate run --pool /mnt/pmem/app.pool --size 4G -- postgres -D /srv/db

A sync (fsync, fdatasync) of the program or of a process that it starts costs an append to the log \
instead of a wait for the disk. After a power cut and recovery files are as that \
program could have left them without Tidegate, with each of its syncs really made. Files stay \
ordinary files on the disk they are on.

Exit status: the program's, or 128 + N if signal N ended it; 1 with a line that begins with \
`tidegate:` if the program was not started."
)]
#[expect(clippy::struct_excessive_bools, reason = "switches of a command line")]
pub(crate) struct RunArgs {
    /// The log pool's file or devdax device, made on demand; by default one on a DAX file system
    /// that the user may write to
    #[arg(long, value_name = "POOL")]
    pub(crate) pool: Option<PathBuf>,
    /// Size of a pool that is made: bytes, or with K, M, G or T (powers of 1024); 1G unless given
    #[arg(long, value_name = "SIZE")]
    pub(crate) size: Option<Size>,
    /// Log only files whose absolute path matches; `*` and `?` also match slashes; may be repeated
    #[arg(long, value_name = "GLOB")]
    pub(crate) include: Vec<OsString>,
    /// Do not log files whose absolute path matches; stronger than --include; may be repeated
    #[arg(long, value_name = "GLOB")]
    pub(crate) exclude: Vec<OsString>,
    /// Programs that change no file that others sync, by their absolute path, as for --include:
    /// files stay in the log while one runs that cannot be watched (static, Go, another C library,
    /// set-user-ID); may be repeated
    #[arg(long, value_name = "GLOB")]
    pub(crate) trust: Vec<OsString>,
    /// Answer syncs at once, without a pool: for tests and builds, whose files need no disk. `kill
    /// -9` loses nothing; a power cut or a kernel crash loses synced data
    #[arg(
        long,
        value_name = "PROGRAMS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "possible",
        conflicts_with_all = [
            "pool", "size", "include", "exclude", "trust", "every_write", "stats", "no_absorb",
        ],
    )]
    pub(crate) volatile: Option<VolatileScope>,
    /// With --volatile: make all syncs once, when the program has ended. If one fails, an exit
    /// status 0 becomes 1
    #[arg(long, requires = "volatile")]
    pub(crate) sync_at_end: bool,
    /// Sync each write of a file when it returns, as if the file were open with `O_SYNC`
    #[arg(long)]
    pub(crate) every_write: bool,
    /// Give each write to the kernel at once: so it is always done
    #[arg(long)]
    pub(crate) no_absorb: bool,
    /// Print no notices on standard error
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// Print a summary on standard error at the end: writes, fsyncs saved, latencies, use of the
    /// log
    #[arg(long)]
    pub(crate) stats: bool,
    /// The program and its arguments
    #[arg(value_name = "CMD", required = true, trailing_var_arg = true)]
    pub(crate) command: Vec<OsString>,
}

/// Which programs a volatile run covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum VolatileScope {
    /// All with `CAP_SYS_ADMIN` (root has it), else as `library`; this is the default
    Possible,
    /// All: static and Go programs too. Without `CAP_SYS_ADMIN` no program gains privileges then:
    /// sudo, su and newuidmap do not work
    All,
    /// Those that use the C library
    Library,
}

/// Arguments of `tidegate recover`.
#[derive(Debug, Args)]
#[command(after_help = "Examples: of a pool at /mnt/pmem:
  tidegate recover /mnt/pmem/app.pool
  tidegate recover /mnt/pmem/app.pool --discard

`tidegate run` and `tidegate serve` do the same before they start.")]
pub(crate) struct RecoverArgs {
    /// The log or cache pool's file or devdax device
    pub(crate) pool: PathBuf,
    /// Throw the log away: writes that only it has are lost
    #[arg(long, conflicts_with = "replay")]
    pub(crate) discard: bool,
    /// Replay every record, also where the files are known to have it
    #[arg(long)]
    pub(crate) replay: bool,
    /// Skip records that are damaged, and files that other programs have changed after their last
    /// record in the log
    #[arg(long, conflicts_with = "discard")]
    pub(crate) salvage: bool,
}

/// Arguments of `tidegate flush`.
#[derive(Debug, Args)]
#[command(after_help = "Examples: of a pool at /mnt/pmem:
  tidegate flush /mnt/pmem/app.pool
  tidegate flush /mnt/pmem/cache --purge")]
pub(crate) struct FlushArgs {
    /// The log or cache pool's file or devdax device
    pub(crate) pool: PathBuf,
    /// Of a cache pool: give up all pages afterwards, so that the cache is empty. Pages that
    /// clients write or read meanwhile may stay
    #[arg(long)]
    pub(crate) purge: bool,
}

/// Arguments of `tidegate stat`.
#[derive(Debug, Args)]
#[command(after_help = "Examples: of a pool at /mnt/pmem:
  tidegate stat /mnt/pmem/pool
  tidegate stat /mnt/pmem/pool --json | jq '.metrics[] | {name, value}'
  tidegate stat /mnt/pmem/pool --reset
  tidegate stat /mnt/pmem/app.pool --json | jq .fsyncs_skipped")]
pub(crate) struct StatArgs {
    /// The pool, or the socket of the server or supervisor that has it open
    #[arg(value_name = "POOL|SOCKET")]
    pub(crate) target: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Of a served pool: have counters and latencies begin with 0 again, once they are printed
    #[arg(long)]
    pub(crate) reset: bool,
}

/// Arguments of `tidegate attach`.
#[derive(Debug, Args)]
#[command(after_help = "Examples: of a pool at /mnt/pmem, as root:
  tidegate attach /mnt/pmem/pool
  tidegate attach /mnt/pmem/cache --ublk=0 --backing /dev/disk/by-id/ata-X
  mount $(tidegate attach /mnt/pmem/pool) /mnt/data

Prints the path of the block device once it can be used. The server goes on in the background and \
logs to the kernel's log; SIGTERM and `tidegate detach` stop it. A pool that is a block device \
already stays one, and its path is printed. The short form of `tidegate serve POOL --ublk`.")]
pub(crate) struct AttachArgs {
    /// The pool's file or devdax device
    pub(crate) pool: PathBuf,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
}

/// Arguments of `tidegate detach`.
#[derive(Debug, Args)]
#[command(after_help = "Examples: of a pool at /mnt/pmem:
  tidegate detach /mnt/pmem/pool

Ends the server of the pool (`attach`, or `serve POOL --ublk`) if nobody uses its block device: all \
data is in the pool or its backing then. A server that was killed, or was stopped while the device \
was in use, has left the device, whose requests wait for the next server: it is deleted, and they \
fail.")]
pub(crate) struct DetachArgs {
    /// The pool's file or devdax device
    pub(crate) pool: PathBuf,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
}

/// Arguments of `tidegate snapshot`.
#[derive(Debug, Args)]
#[command(after_help = "Examples: of a pool at /mnt/pmem:
  tidegate snapshot /mnt/pmem/pool /backup/pool-monday

Every block is in the copy as it was at one instant, with all writes that were acknowledged \
before. All writes wait for an instant; later ones wait until what they replace is saved. An \
interrupt ends the copy. It is made by the server, belongs to its user, and is a pool: serve it, or \
`check` it. Of a pool with a backing the copy is the device, complete without the pool: serve it \
behind a new pool, or put it back in the place of the backing. With --atomic-flush it is refused while writes wait for a flush.")]
pub(crate) struct SnapshotArgs {
    /// The served pool, or the control socket of its server
    #[arg(value_name = "POOL|SOCKET")]
    pub(crate) target: PathBuf,
    /// The file that is made
    pub(crate) file: PathBuf,
}

/// Arguments of `tidegate list`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  tidegate list
  tidegate list --csv
  tidegate list --json | jq '.devices[] | select(.state != \"up\")'

Shows the devices of all servers of this user, and for root of all users: export, block device of \
this machine, state, bytes that the backing lacks, pool, backing, and addresses; for a device that \
cannot be opened also why.")]
pub(crate) struct ListArgs {
    /// Print one JSON object
    #[arg(long, conflicts_with = "csv")]
    pub(crate) json: bool,
    /// Print a line with commas for each device, below a line with the names of the columns
    #[arg(long)]
    pub(crate) csv: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  tidegate doctor
  sudo tidegate doctor
  tidegate doctor --json | jq '.findings[] | select(.state != \"ok\")'

Looks at this machine and changes nothing. As root it also tries what only root may do, such as the \
ublk driver. The state of a topic is ok, limited or missing; the line below says what to do.")]
pub(crate) struct DoctorArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  tidegate reload
  tidegate reload /etc/tidegate/tidegate.toml

A device that is new in the file is opened, and one that is no longer there is closed: its clients' \
connections end once their requests are answered, and its tiers are written back. A device whose \
table has changed is closed and opened anew; clients that connect meanwhile wait. If it cannot be \
opened by the new table, it is opened by the old one again. Other devices are not touched. A file \
with faults changes nothing. SIGHUP does the same, and logs it.

Exit status: 0 all is as the file says; 1 a part could not be done, which is told; 2 wrong usage.")]
pub(crate) struct ReloadArgs {
    /// Only the servers of this file; each server of a file unless given
    #[arg(value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
}

/// Arguments of `tidegate top`.
#[derive(Debug, Args)]
#[command(after_help = "Examples: of a pool at /mnt/pmem:
  tidegate top /mnt/pmem/pool

Once a second: clients, requests, errors, what each tier has still to write below and how long \
that takes, use of the log, and latencies by tier (one request in 64 is measured). Keys: q quits, \
p pauses, s puts the slowest tier first.")]
pub(crate) struct TopArgs {
    /// The served pool, or the control socket of its server
    #[arg(value_name = "POOL|SOCKET")]
    pub(crate) target: PathBuf,
}

/// Arguments of `tidegate pages`.
#[derive(Debug, Args)]
pub(crate) struct PagesArgs {
    /// The directory below which they are written, such as `/usr/share`
    #[arg(value_name = "DIR")]
    pub(crate) share: PathBuf,
}

/// Arguments of `tidegate set`.
#[derive(Debug, Args)]
#[command(after_help = "Examples: of a pool at /mnt/pmem:
  tidegate set /mnt/pmem/log clean-from-pct=25
  tidegate set /mnt/pmem/cache eviction=lru mode=wt
  tidegate set /mnt/pmem/cache io-classes=@classes.csv

`tidegate stat` lists the settings. A cache pool keeps them; others forget them with the server.")]
pub(crate) struct SetArgs {
    /// The served pool, or the control socket of its server; or a cache pool that none serves
    #[arg(value_name = "POOL|SOCKET")]
    pub(crate) target: PathBuf,
    /// Settings and their new values; @FILE for the lines of a file
    #[arg(value_name = "KEY=VALUE", required = true, value_parser = parse_setting)]
    pub(crate) settings: Vec<(String, String)>,
}

fn parse_setting(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("expected KEY=VALUE")?;
    if key.is_empty() {
        return Err("expected KEY=VALUE".into());
    }
    let value = value.strip_prefix('@').map_or_else(|| Ok(value.into()), value_from)?;
    Ok((key.into(), value))
}

/// Most bytes of a file that holds a value: more than any pool keeps.
const VALUE_BYTES_MAX: u64 = 64 << 10;

/// Returns the lines of the file at `path` as one value, with semicolons between them.
fn value_from(path: &str) -> Result<String, String> {
    let text = opening::read_text(Path::new(path), VALUE_BYTES_MAX);
    let text = text.map_err(|error| format!("cannot read {path}: {error}"))?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    Ok(lines.collect::<Vec<_>>().join(";"))
}

pub(crate) fn parse_count(text: &str) -> Result<NonZeroUsize, String> {
    let count = text.parse::<usize>().ok().and_then(NonZeroUsize::new);
    count.ok_or_else(|| "a whole number from 1 on is expected".into())
}

pub(crate) fn parse_mode(text: &str) -> Result<String, SettingError> {
    check_mode(text).map(|()| text.to_owned())
}

pub(crate) fn parse_unix(text: &str) -> Result<PathBuf, String> {
    match text.parse() {
        Ok(ListenAddress::Unix(path)) => Ok(path),
        Err(error) if text.starts_with("unix:") => Err(error.to_string()),
        _ => Err("expected unix:PATH".into()),
    }
}

/// Parses the path of a socket, with `unix:` before it unless it has a directory.
pub(crate) fn parse_socket(text: &str) -> Result<PathBuf, String> {
    let is_path = text.starts_with(['/', '.']);
    if is_path { parse_unix(&format!("unix:{text}")) } else { parse_unix(text) }
}

/// Arguments of the supervisor. Its standard input is the connection to its launcher.
#[derive(Debug, Args)]
pub(crate) struct SuperviseArgs {
    /// The log pool's file or devdax device, absolute
    pub(crate) pool: PathBuf,
    /// As for `recover`
    #[arg(long)]
    pub(crate) replay: bool,
    /// As for `recover`
    #[arg(long)]
    pub(crate) salvage: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    /// Prose is wrapped where a terminal's line ends, so it has no ends of its own. Examples are
    /// not wrapped: they fit 80 columns.
    #[test]
    fn what_follows_the_options_fits_any_terminal() {
        let mut commands = vec![Cli::command()];
        let mut paragraphs = 0;
        while let Some(command) = commands.pop() {
            commands.extend(command.get_subcommands().cloned());
            let Some(text) = command.get_after_help().map(ToString::to_string) else { continue };
            let (name, lines) = (command.get_name(), text.lines().collect::<Vec<_>>());
            for pair in lines.windows(2) {
                let is_prose = |line: &str| !line.is_empty() && !line.starts_with(' ');
                assert!(!pair.iter().all(|line| is_prose(line)), "{name}: {pair:?}");
            }
            let wide = lines.iter().find(|line| line.starts_with(' ') && line.len() > 80);
            assert_eq!(wide, None, "{name}: an example is wrapped");
            paragraphs += lines.len();
        }
        assert!(paragraphs > 50, "{paragraphs}");
    }
}
