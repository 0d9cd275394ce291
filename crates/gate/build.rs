//! Compiles the kernel programs of bpf/ with clang and generates the Rust side of bpf/include/abi.h.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};

const PROGRAMS: [&str; 6] = ["ingress", "steer", "request", "share", "answer", "events"];

/// Map keys and values are turned into bytes and back; the derives refuse a type with padding.
#[derive(Debug)]
struct AsBytes;

impl bindgen::callbacks::ParseCallbacks for AsBytes {
    fn add_derives(&self, _: &bindgen::callbacks::DeriveInfo<'_>) -> Vec<String> {
        ["FromBytes", "IntoBytes", "Immutable", "KnownLayout"]
            .map(|name| format!("zerocopy::{name}"))
            .to_vec()
    }
}

fn main() {
    let out = PathBuf::from(variable("OUT_DIR"));
    let bpf = Path::new(&variable("CARGO_MANIFEST_DIR")).join("../../bpf");
    println!("cargo::rerun-if-changed={}", bpf.display());
    for program in PROGRAMS {
        compile(&bpf, program, &out.join(format!("{program}.bpf.o")));
    }
    let bindings = bindgen::Builder::default()
        .header(bpf.join("include/abi.h").display().to_string())
        .allowlist_item("(tg|TG)_.*")
        .prepend_enum_name(false)
        .derive_debug(true)
        .parse_callbacks(Box::new(AsBytes))
        .generate()
        .unwrap_or_else(|error| fail(&format!("bpf/include/abi.h: {error}")));
    if let Err(error) = bindings.write_to_file(out.join("abi.rs")) {
        fail(&format!("abi.rs: {error}"));
    }
}

fn compile(bpf: &Path, program: &str, object: &Path) {
    let source = bpf.join(program).join(format!("{program}.bpf.c"));
    // Set by libbpf-sys: the headers of the libbpf that is linked.
    let libbpf = variable("DEP_BPF_INCLUDE");
    let mut clang = Command::new("clang");
    clang.args(["-target", "bpf", "-mcpu=v3", "-g", "-O2", "-Wall", "-Wextra", "-Werror", "-c"]);
    clang.arg("-I").arg(bpf.join("include")).arg("-I").arg(libbpf);
    // Debian keeps asm/ per architecture.
    clang.arg("-idirafter").arg(format!("/usr/include/{}-linux-gnu", variable("CARGO_CFG_TARGET_ARCH")));
    run(clang.arg(&source).arg("-o").arg(object));
    // DWARF is of no use to the kernel; BTF stays.
    run(Command::new("llvm-strip").arg("-g").arg(object));
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
