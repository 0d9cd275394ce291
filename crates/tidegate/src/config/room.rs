//! Whether this host has room for the cache: neither its memory nor its disk is to end while the cache is prepared or fills.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use tidegate_accelerator::settings::Cache;

/// What is expected of `cache.memory` instead, if there is no room for it.
pub(super) fn expected(cache: &Cache) -> Option<String> {
    let memory = memory_bytes(&std::fs::read_to_string("/proc/meminfo").ok()?)?;
    expected_of(cache, memory, room_bytes)
}

fn expected_of(cache: &Cache, memory: u64, room_of: impl Fn(&Path) -> Option<u64>) -> Option<String> {
    let most = |bytes: u64| format!("expected at most {} MiB", bytes >> 20);
    if cache.memory_bytes > memory {
        return Some(format!("{}, the memory of this host", most(memory)));
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

/// What the file system has for the cache's directory, which may not be there yet, and what the cache has of it already.
/// `None`: it does not say.
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
        let said = |cache: Cache| expected_of(&cache, 8 << 20, |_| Some(4 << 20));
        assert_eq!(said(cache(8 << 20, None)), None);
        assert_eq!(said(cache(4 << 20, Some(path))), None);
        let of_memory = "expected at most 8 MiB, the memory of this host";
        assert_eq!(said(cache((8 << 20) + 1, Some(path))).as_deref(), Some(of_memory));
        let of_disk = "expected at most 4 MiB, the room that there is for it in /var/cache";
        assert_eq!(said(cache((4 << 20) + 1, Some(path))).as_deref(), Some(of_disk));
        assert_eq!(expected_of(&cache(1 << 20, Some(path)), 8 << 20, |_| None), None);
    }

    #[test]
    fn room_is_that_of_the_nearest_directory_that_is_there_if_its_file_system_says() {
        let folder = tempfile::tempdir().unwrap();
        assert!(room_bytes(&folder.path().join("not/yet")).is_some_and(|room| room > 0));
        // The kernel's own has no blocks.
        assert_eq!(room_bytes(Path::new("/proc/nowhere")), None);
    }
}
