//! Block lists in files, and over a restart. Most need no privilege: the list in user space is kept like the kernel's.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

mod support;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use support::{Namespace, explained, needs_root};
use tidegate_core::{IpPrefix, Verdict};
use tidegate_gate::{BlockSources, Blocks, Gate, Keeper, KeeperNote, Options, check_list};
use tidegate_policy::RuleSet;

fn gate() -> Gate {
    Gate::user_space(&RuleSet::default(), &Options::default(), "test").unwrap()
}

fn is_blocked(gate: &Gate, address: &str) -> bool {
    let peer = SocketAddr::new(address.parse::<IpAddr>().unwrap(), 1);
    gate.on_connect(peer, "10.0.0.1:80".parse().unwrap()).verdict == Verdict::Drop
}

/// A folder that vanishes with the test.
struct Folder(std::path::PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tidegate-keeper-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Lists are told apart by their time of change and their length.
fn rewrite(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
}

#[test]
fn list_in_a_file_is_followed_and_one_with_an_error_changes_nothing() {
    let folder = Folder::new("list");
    let path = folder.0.join("drop.list");
    rewrite(&path, "10.0.0.1\n# why\n192.0.2.0/24 # them\n");
    let sources = BlockSources { directory: None, files: vec![path.clone(), folder.0.join("later.list")] };
    let gate = gate();
    let (mut keeper, notes) = Keeper::start(&gate, &sources);
    assert_eq!(notes.iter().filter(|note| note.is_fault()).count(), 1, "one is missing: {notes:?}");
    assert!(is_blocked(&gate, "10.0.0.1") && is_blocked(&gate, "192.0.2.9"));
    assert!(keeper.tick(&gate).is_empty(), "a missing list is told of once");

    rewrite(&path, "192.0.2.0/24\n10.0.0.22\n");
    let notes = keeper.tick(&gate);
    assert!(notes[0].to_string().ends_with("1 blocked, 1 no longer"), "{notes:?}");
    assert!(!is_blocked(&gate, "10.0.0.1") && is_blocked(&gate, "10.0.0.22"));

    rewrite(&path, "192.0.2.0/24\n10.0.0.22\n10.0.0.400\n");
    let notes = keeper.tick(&gate);
    assert!(notes[0].is_fault() && notes[0].to_string().contains("line 3: `10.0.0.400`"), "{notes:?}");
    assert!(is_blocked(&gate, "10.0.0.22"));

    rewrite(&folder.0.join("later.list"), "10.0.0.3\n");
    keeper.tick(&gate);
    assert!(is_blocked(&gate, "10.0.0.3"));
    keeper.replace_sources(&gate, &BlockSources::default());
    assert!(!is_blocked(&gate, "10.0.0.3") && !is_blocked(&gate, "192.0.2.9"));
}

fn add(gate: &Gate, prefix: &str, lifetime: Option<Duration>) {
    gate.blocks().add(prefix.parse().unwrap(), lifetime).unwrap();
}

/// Blocks by commands and by two lists of the same things, in the kernel or not.
fn what_nobody_wants_any_more_is_unblocked(gate: &Gate, folder: &Folder) {
    let (a, b) = (folder.0.join("a.list"), folder.0.join("b.list"));
    let hour = Some(Duration::from_secs(3600));
    let is_blocked = |address: &str| gate.blocks().blocks(address.parse().unwrap()).unwrap();
    add(gate, "10.0.0.3", None);
    add(gate, "10.0.0.4", hour);
    add(gate, "2001:db8::/32", hour);
    gate.blocks().set_reason("10.0.0.4".parse().unwrap(), "an operator said so").unwrap();
    rewrite(&a, "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4\n10.0.0.5\n192.0.2.0/24\n2001:db8::/32\n");
    rewrite(&b, "10.0.0.1\n192.0.2.0/24\n");
    let directory = Some(folder.0.join("kept"));
    let sources = BlockSources { directory, files: vec![a.clone(), b.clone()] };
    let (mut keeper, notes) = Keeper::start(gate, &sources);
    assert!(!notes.iter().any(KeeperNote::is_fault), "{notes:?}");
    // While it stands in a list.
    add(gate, "10.0.0.5", None);

    rewrite(&a, "10.0.0.9\n");
    assert!(!keeper.tick(gate).iter().any(KeeperNote::is_fault));
    for (address, why) in [
        ("10.0.0.1", "the other list has it"),
        ("192.0.2.7", "the other list has it"),
        ("10.0.0.3", "blocked by a command before"),
        ("10.0.0.4", "blocked by a command for a time"),
        ("10.0.0.5", "blocked by a command while a list had it"),
        ("2001:db8::9", "blocked by a command for a time"),
    ] {
        assert!(is_blocked(address), "{address}: {why}");
    }
    assert!(!is_blocked("10.0.0.2"));
    let listed = gate.blocks().list().unwrap();
    let entry = |prefix: &str| listed.iter().find(|entry| entry.prefix.to_string() == prefix).unwrap();
    assert!(entry("10.0.0.4/32").remaining > Some(Duration::from_secs(3500)));
    assert_eq!(entry("10.0.0.4/32").reason.as_deref(), Some("an operator said so"));
    assert!(entry("192.0.2.0/24").listed && !entry("10.0.0.5/32").listed);

    // A list that is not asked for any more.
    keeper.replace_sources(gate, &BlockSources { files: vec![a.clone()], ..sources });
    assert!(!is_blocked("10.0.0.1") && !is_blocked("192.0.2.7") && is_blocked("10.0.0.9"));
    keeper.tick(gate);
    let kept = std::fs::read_to_string(folder.0.join("kept/blocked")).unwrap();
    let mut kept: Vec<&str> = kept.lines().map(|line| line.split(' ').next().unwrap()).collect();
    kept.sort_unstable();
    assert_eq!(kept, ["10.0.0.3/32", "10.0.0.4/32", "10.0.0.5/32", "2001:db8::/32"]);
}

#[test]
fn what_another_list_or_a_command_blocks_stays_blocked_when_a_list_drops_it() {
    what_nobody_wants_any_more_is_unblocked(&gate(), &Folder::new("shared"));
}

#[test]
fn in_the_kernel_what_another_list_or_a_command_blocks_stays_blocked_when_a_list_drops_it() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let gate = explained(Gate::load(&RuleSet::default(), &Options::default()));
    what_nobody_wants_any_more_is_unblocked(&gate, &Folder::new("shared-kernel"));
}

fn what_a_list_blocks_comes_back(gate: &Gate, folder: &Folder) {
    let path = folder.0.join("drop.list");
    let is_blocked = |address: &str| gate.blocks().blocks(address.parse().unwrap()).unwrap();
    let listed = ["1.0.0.1", "1.0.0.2", "192.0.2.0"];
    rewrite(&path, "1.0.0.1\n1.0.0.2\n192.0.2.0/24\n");
    let (mut keeper, _) = Keeper::start(gate, &BlockSources { directory: None, files: vec![path] });
    let one = |i: u32| IpPrefix::new(Ipv4Addr::from((20 << 24) + i).into(), 32).unwrap();
    let many: Vec<IpPrefix> = (0..Blocks::MAX_ADDRESSES).map(one).collect();
    explained(gate.blocks().add_many(&many, None));
    assert!(!is_blocked("1.0.0.1") && !is_blocked("1.0.0.2"), "they have not hit for longest");
    let evicted = u64::from(Blocks::MAX_ADDRESSES / 100);
    let report = explained(gate.show());
    assert_eq!(report.blocked.evicted, evicted);
    assert!(report.to_string().contains(&format!("{evicted} addresses evicted")), "{report}");
    // A command that blocks for less long than the list does.
    add(gate, "192.0.2.0/24", Some(Duration::ZERO));
    assert!(!is_blocked("192.0.2.0"));
    assert!((0..10).all(|_| keeper.tick(gate).is_empty()));
    assert!(listed.into_iter().all(is_blocked));
    assert_eq!(explained(gate.show()).blocked.evicted, evicted, "nothing had to make room for them");
}

#[test]
fn what_a_list_blocks_comes_back_after_it_was_evicted() {
    what_a_list_blocks_comes_back(&gate(), &Folder::new("evicted"));
}

#[test]
fn in_the_kernel_what_a_list_blocks_comes_back_after_it_was_evicted() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let gate = explained(Gate::load(&RuleSet::default(), &Options::default()));
    what_a_list_blocks_comes_back(&gate, &Folder::new("evicted-kernel"));
}

#[test]
fn list_that_others_had_to_make_room_for_says_how_many() {
    let folder = Folder::new("crowded");
    let path = folder.0.join("drop.list");
    let gate = gate();
    let one = |i: u32| IpPrefix::new(Ipv4Addr::from((20 << 24) + i).into(), 32).unwrap();
    let many: Vec<IpPrefix> = (0..Blocks::MAX_ADDRESSES).map(one).collect();
    explained(gate.blocks().add_many(&many, None));
    rewrite(&path, "1.0.0.1\n");
    let (_keeper, notes) = Keeper::start(&gate, &BlockSources { directory: None, files: vec![path] });
    assert!(notes.len() == 1 && notes[0].is_fault() && is_blocked(&gate, "1.0.0.1"), "{notes:?}");
    let evicted = Blocks::MAX_ADDRESSES / 100;
    let said = notes[0].to_string();
    assert!(
        said.contains("1 blocked") && said.contains(&format!("{evicted} addresses are not blocked")),
        "{said}"
    );
}

#[test]
fn list_that_does_not_fit_is_told_of_once_and_tried_again_until_it_fits() {
    let folder = Folder::new("full");
    let path = folder.0.join("drop.list");
    let gate = gate();
    let net = |i: u32| IpPrefix::new(Ipv4Addr::from((20 << 24) + (i << 8)).into(), 24).unwrap();
    let all: Vec<IpPrefix> = (0..Blocks::MAX_PREFIXES).map(net).collect();
    gate.blocks().add_many(&all, None).unwrap();
    rewrite(&path, "192.0.2.0/24\n");
    let name = path.display().to_string();
    let (mut keeper, notes) = Keeper::start(&gate, &BlockSources { directory: None, files: vec![path] });
    assert!(notes.len() == 1 && notes[0].is_fault(), "{notes:?}");
    let said = notes[0].to_string();
    assert!(said.starts_with(&name) && said.contains("holds at most 65536 entries"), "{said}");
    let notes: Vec<KeeperNote> = (0..30).flat_map(|_| keeper.tick(&gate)).collect();
    assert!(notes.is_empty() && !is_blocked(&gate, "192.0.2.1"), "{notes:?}");
    gate.blocks().remove(&all[7]).unwrap();
    let notes: Vec<KeeperNote> = (0..20).flat_map(|_| keeper.tick(&gate)).collect();
    assert!(is_blocked(&gate, "192.0.2.1"));
    assert!(notes.len() == 1 && notes[0].to_string().ends_with("1 blocked, 0 no longer"), "{notes:?}");
}

#[test]
fn dynamic_blocks_survive_a_restart_with_what_is_left_of_their_life() {
    let folder = Folder::new("kept");
    let list = folder.0.join("drop.list");
    rewrite(&list, "10.0.0.7\n");
    let sources = BlockSources { directory: Some(folder.0.join("kept")), files: vec![list] };
    let (before, after) = (gate(), gate());
    let (mut keeper, _) = Keeper::start(&before, &sources);
    let hour = Some(Duration::from_secs(3600));
    before.blocks().add("10.0.0.1".parse().unwrap(), hour).unwrap();
    before.blocks().set_reason("10.0.0.1".parse().unwrap(), "it guessed passwords").unwrap();
    before.blocks().add("2001:db8::/32".parse().unwrap(), None).unwrap();
    before.blocks().add("10.0.0.2".parse().unwrap(), Some(Duration::ZERO)).unwrap();
    assert!(keeper.tick(&before).is_empty());
    let kept = std::fs::read_to_string(folder.0.join("kept/blocked")).unwrap();
    assert!(!kept.contains("10.0.0.7"), "its file is there: {kept}");
    std::fs::write(folder.0.join("kept/blocked"), kept + "nonsense\n10.0.0.9/32 1 long ago\n").unwrap();

    let (_, notes) = Keeper::start(&after, &BlockSources { files: Vec::new(), ..sources });
    assert!(
        notes[0].to_string().contains("2 blocks are in force again, 1 lines were not readable"),
        "{notes:?}"
    );
    let mut blocked = after.blocks().list().unwrap();
    blocked.sort_by_key(|entry| entry.prefix);
    assert_eq!(blocked[0].reason.as_deref(), Some("it guessed passwords"));
    assert!(blocked[0].remaining > Some(Duration::from_secs(3500)) && blocked[1].remaining.is_none());
    assert!(is_blocked(&after, "2001:db8::1") && !is_blocked(&after, "10.0.0.9"));
}

#[test]
fn a_directory_that_cannot_be_written_to_is_told_of_at_the_start() {
    // Nobody makes anything in /proc, whatever user the tests run as.
    for directory in ["/proc/self", "/proc/nowhere"] {
        let sources = BlockSources { directory: Some(directory.into()), files: Vec::new() };
        let (_, notes) = Keeper::start(&gate(), &sources);
        let [note] = notes.as_slice() else { panic!("{notes:?}") };
        let text = note.to_string();
        assert!(note.is_fault() && text.starts_with(&format!("{directory}/blocked: ")), "{text}");
        assert!(text.contains("blocks do not survive a restart: block.path has to be"), "{text}");
    }
}

#[test]
fn damaged_lines_of_the_kept_list_block_nobody_and_cost_no_other_block() {
    let folder = Folder::new("damaged");
    let path = folder.0.join("blocked");
    let sources = BlockSources { directory: Some(folder.0.clone()), files: Vec::new() };
    let until = 4_000_000_000_u64;
    let damaged: [&[u8]; 4] =
        [b"10.9.9.\xff/32 -\n", b"10.9.9.9/32 17x0 errors\n", b"10.9.9.8/32\n", b"203.0.113.7/3"];
    for line in damaged {
        let good = format!("10.0.0.1/32 {until} errors\n");
        let kept = [good.as_bytes(), b"10.0.0.2/32 - caf\xe9\n", line].concat();
        std::fs::write(&path, &kept).unwrap();
        let gate = gate();
        let (mut keeper, notes) = Keeper::start(&gate, &sources);
        let text = String::from_utf8_lossy(line);
        assert!(matches!(notes[0], KeeperNote::Restored { count: 2, damaged: 1, .. }), "{text}: {notes:?}");
        assert!(notes[0].is_fault(), "{notes:?}");
        assert!(is_blocked(&gate, "10.0.0.1") && is_blocked(&gate, "10.0.0.2"), "{text}");
        assert_eq!(gate.blocks().list().unwrap().len(), 2, "{text}");
        // What the next save leaves out is not lost.
        add(&gate, "10.0.0.3", None);
        assert!(keeper.tick(&gate).is_empty());
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 3);
        assert_eq!(std::fs::read(path.with_extension("damaged")).unwrap(), kept);
    }
}

#[test]
fn lists_are_checked_without_blocking_anybody() {
    let folder = Folder::new("check");
    let path = folder.0.join("drop.list");
    assert!(check_list(&path).is_err());
    rewrite(&path, "10.0.0.1\nten\n");
    assert!(check_list(&path).unwrap_err().to_string().contains("line 2: `ten`"));
    rewrite(&path, "10.0.0.1\n192.0.2.0/24 # them\n");
    assert_eq!(check_list(&path).unwrap(), 2);
}
