//! slowhttptest, in each of its three ways at once.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tidegate_bench::LOAD_CORE;
use tidegate_bench::peers::pinned;

use super::Shared;
use crate::Error;

/// Ended when it goes.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs the programs until the scene is over.
pub(super) fn run(shared: &Shared, connections: u32) -> Result<(), Error> {
    let scene = shared.scene;
    let directory = tempfile::tempdir().map_err(Error::file("write", &std::env::temp_dir()))?;
    // Slow heads, slow bodies and slow reading, as the manual of slowhttptest shows them.
    let ways: [&[&str]; 3] = [
        &["-H", "-i", "1", "-x", "24", "-t", "GET"],
        &["-B", "-i", "1", "-s", "8192", "-x", "10", "-t", "POST"],
        &["-X", "-w", "1", "-y", "64", "-n", "5", "-z", "32", "-k", "3"],
    ];
    let start = |way: &&[&str]| {
        let path = if way[0] == "-X" { "large" } else { "object" };
        // They spin, on the core that good clients share with them: how much of it they take is not the subject.
        let mut command = Command::new("nice");
        command.args(["-n", "19", "slowhttptest"]);
        command.args(*way).args(["-v", "0", "-p", "3", "-u", &format!("http://{}/{path}", scene.server)]);
        command.args(["-c", &connections.to_string(), "-r", &connections.to_string()]);
        command.args(["-l", &(scene.during.as_secs() + 5).to_string()]);
        start(directory.path(), &command)
    };
    let _running = ways.iter().map(start).collect::<Result<Vec<Running>, Error>>()?;
    while !shared.is_over() {
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn start(directory: &Path, command: &Command) -> Result<Running, Error> {
    let mut command = pinned(LOAD_CORE, command);
    command.current_dir(directory).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().map(Running).map_err(Error::Load)
}
