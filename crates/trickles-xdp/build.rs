//! Compiles bpf/trickles with clang.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};

fn main() {
    let bpf = Path::new(&variable("CARGO_MANIFEST_DIR")).join("../../bpf/trickles/trickles.bpf.c");
    println!("cargo::rerun-if-changed={}", bpf.display());
    let object = PathBuf::from(variable("OUT_DIR")).join("trickles.bpf.o");
    let mut clang = Command::new("clang");
    clang.args(["-target", "bpf", "-mcpu=v3", "-g", "-O2", "-Wall", "-Wextra", "-Werror", "-c"]);
    // Set by libbpf-sys: the headers of the libbpf that is linked.
    clang.arg("-I").arg(variable("DEP_BPF_INCLUDE"));
    // Debian keeps asm/ per architecture.
    clang.arg("-idirafter").arg(format!("/usr/include/{}-linux-gnu", variable("CARGO_CFG_TARGET_ARCH")));
    run(clang.arg(&bpf).arg("-o").arg(&object));
    // DWARF is of no use to the kernel; BTF stays.
    run(Command::new("llvm-strip").arg("-g").arg(&object));
}

fn run(command: &mut Command) {
    let name = command.get_program().to_string_lossy().into_owned();
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => fail(&format!("{name}: {status}")),
        Err(error) => fail(&format!("{name}: {error}; scripts/setup installs clang and llvm")),
    }
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| fail(&format!("{name} is not set")))
}

fn fail(message: &str) -> ! {
    eprintln!("{message}");
    exit(1)
}
