//! Whether there is room for the cache: neither the memory of this host, or of the control group that tidegate runs in,
//! nor the disk is to end while the cache is prepared or fills.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use tidegate_accelerator::settings::Cache;

/// What is expected of `cache.memory` instead, if there is no room for it.
pub(super) fn expected(cache: &Cache) -> Option<String> {
    let host = memory_bytes(&std::fs::read_to_string("/proc/meminfo").ok()?)?;
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = group_limit_bytes(&groups, Path::new("/sys/fs/cgroup"));
    expected_of(cache, Memory { host, group }, room_bytes)
}

#[derive(Clone, Copy)]
struct Memory {
    host: u64,
    /// What the control group may use, if that is limited.
    group: Option<u64>,
}

fn expected_of(cache: &Cache, memory: Memory, room_of: impl Fn(&Path) -> Option<u64>) -> Option<String> {
    let most = |bytes: u64| format!("expected at most {} MiB", bytes >> 20);
    if let Some(limit) = memory.group.filter(|&limit| limit < memory.host && cache.memory_bytes > limit) {
        return Some(format!("{}, the memory that this control group may use", most(limit)));
    }
    if cache.memory_bytes > memory.host {
        return Some(format!("{}, the memory of this host", most(memory.host)));
    }
    let path = cache.path.as_deref()?;
    let room = room_of(path)?;
    (cache.memory_bytes > room)
        .then(|| format!("{}, the room that there is for it in {}", most(room), path.display()))
}

/// `MemTotal` of proc_meminfo(5).
fn memory_bytes(meminfo: &str) -> Option<u64> {
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    Some(total.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}

/// The least limit of memory of the groups that proc_cgroups(7) says this process is in, and of those above them, in
/// either version of cgroups(7). In a container the path may be one of its host: the groups that are seen from inside
/// count.
fn group_limit_bytes(groups: &str, mounted: &Path) -> Option<u64> {
    let limits = groups.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, group) = (parts.next()?, parts.next()?.trim_start_matches('/'));
        let (hierarchy, file) = match controllers {
            "" => (mounted.to_owned(), "memory.max"),
            some if some.split(',').any(|name| name == "memory") => {
                (mounted.join("memory"), "memory.limit_in_bytes")
            }
            _ => return None,
        };
        let group = hierarchy.join(group);
        let above = group.ancestors().take_while(|folder| folder.starts_with(&hierarchy));
        // A group without a limit says "max", or a number above any memory.
        above.filter_map(|folder| std::fs::read_to_string(folder.join(file)).ok()?.trim().parse().ok()).min()
    });
    limits.min()
}

/// What the file system has for the cache's directory, which may not be there yet, and what the cache has of it
/// already. `None`: it does not say.
fn room_bytes(directory: &Path) -> Option<u64> {
    let there = directory.ancestors().find(|folder| folder.exists())?;
    let system = rustix::fs::statvfs(there).ok().filter(|system| system.f_blocks > 0)?;
    // With what only root may have: a start that fails for it says so.
    let free = system.f_bfree.saturating_mul(system.f_frsize);
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let own = entries.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"arena"));
    let taken = own.filter_map(|entry| entry.metadata().ok()).map(|file| file.blocks() * 512).sum();
    Some(free.saturating_add(taken))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(memory_bytes: u64, path: Option<&Path>) -> Cache {
        Cache { memory_bytes, path: path.map(Path::to_owned), ..Cache::default() }
    }

    #[test]
    fn memory_is_read_in_the_kernels_unit() {
        assert_eq!(memory_bytes("MemTotal:       16384 kB\nMemFree:  1 kB\n"), Some(16 << 20));
        assert_eq!(memory_bytes("MemFree:  1 kB\n"), None);
    }

    #[test]
    fn cache_is_bounded_by_the_memory_and_by_the_file_system_of_its_directory() {
        let path = Path::new("/var/cache");
        let host = Memory { host: 8 << 20, group: None };
        let said = |cache: Cache| expected_of(&cache, host, |_| Some(4 << 20));
        assert_eq!(said(cache(8 << 20, None)), None);
        assert_eq!(said(cache(4 << 20, Some(path))), None);
        let of_memory = "expected at most 8 MiB, the memory of this host";
        assert_eq!(said(cache((8 << 20) + 1, Some(path))).as_deref(), Some(of_memory));
        let of_disk = "expected at most 4 MiB, the room that there is for it in /var/cache";
        assert_eq!(said(cache((4 << 20) + 1, Some(path))).as_deref(), Some(of_disk));
        assert_eq!(expected_of(&cache(1 << 20, Some(path)), host, |_| None), None);
    }

    #[test]
    fn cache_is_bounded_by_the_control_group_where_that_has_less_than_the_host() {
        let said = |group, bytes| {
            expected_of(&cache(bytes, None), Memory { host: 8 << 20, group: Some(group) }, |_| None)
        };
        assert_eq!(said(2 << 20, 2 << 20), None);
        let of_group = "expected at most 2 MiB, the memory that this control group may use";
        assert_eq!(said(2 << 20, (2 << 20) + 1).as_deref(), Some(of_group));
        let of_host = "expected at most 8 MiB, the memory of this host";
        assert_eq!(said(u64::MAX, (8 << 20) + 1).as_deref(), Some(of_host));
    }

    #[test]
    fn limit_is_the_least_of_all_groups_and_those_above_in_either_version() {
        let mounted = tempfile::tempdir().unwrap();
        let limit = |groups: &str| group_limit_bytes(groups, mounted.path());
        let write = |file: &str, limit: &str| {
            let file = mounted.path().join(file);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, limit).unwrap();
        };
        assert_eq!(limit("0::/shop/web\n"), None);
        write("shop/web/memory.max", "max\n");
        assert_eq!(limit("0::/shop/web\n"), None);
        write("shop/memory.max", "4096000\n");
        assert_eq!(limit("0::/shop/web\n"), Some(4_096_000));
        write("shop/web/memory.max", "2048000\n");
        assert_eq!(limit("0::/shop/web\n"), Some(2_048_000));
        assert_eq!(limit("0::/\n"), None);
        // A container sees its own group as the root, and its host's path in proc(5).
        write("memory/memory.limit_in_bytes", "1024000\n");
        assert_eq!(limit("5:cpu,memory:/docker/0123\n1:cpuset:/\n0::/\n"), Some(1_024_000));
        assert_eq!(limit("5:cpuset:/docker/0123\nnonsense\n"), None);
    }

    #[test]
    fn room_is_that_of_the_nearest_directory_that_is_there_if_its_file_system_says() {
        let folder = tempfile::tempdir().unwrap();
        assert!(room_bytes(&folder.path().join("not/yet")).is_some_and(|room| room > 0));
        // The kernel's own has no blocks.
        assert_eq!(room_bytes(Path::new("/proc/nowhere")), None);
    }
}
