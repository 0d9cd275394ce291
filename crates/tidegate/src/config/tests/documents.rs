//! Examples and pages of the guide that speak of configuration: those that people wrote, and those that the table of keys
//! gives.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use tidegate_accelerator::settings::{Balance, Target};
use tidegate_e2e::{pages, project};

use super::super::*;
use super::accepted;

#[test]
fn the_example_of_the_guide_means_what_it_says() {
    let loaded = accepted(&std::fs::read_to_string(project().join("examples/tidegate.toml")).unwrap());
    assert_eq!(loaded.settings.listeners.len(), 1);
    assert_eq!(loaded.settings.upstreams[0].servers.len(), 2);
    assert_eq!(loaded.settings.upstreams[0].balance, Balance::RoundRobin);
    assert_eq!(loaded.settings.routes[0].target, Target::Upstream("app".into()));
    assert_eq!(loaded.admin.written, "127.0.0.1:9090");
}

/// The TOML files of a folder and those below it that are no manifests of crates.
fn configurations(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let (path, is_folder) = (entry.path(), entry.file_type().unwrap().is_dir());
        if is_folder {
            configurations(&path, found);
        } else if path.extension() == Some(OsStr::new("toml")) && !path.ends_with("Cargo.toml") {
            found.push(path);
        }
    }
}

#[test]
fn configurations_in_examples_packaging_and_documents_are_complete_and_without_warnings() {
    let mut checked = Vec::new();
    for folder in ["examples", "packaging"] {
        let mut paths = Vec::new();
        configurations(&project().join(folder), &mut paths);
        assert!(!paths.is_empty(), "{folder} has none");
        checked.extend(paths.into_iter().map(|path| {
            let text = std::fs::read_to_string(&path).unwrap();
            (path.display().to_string(), true, text)
        }));
    }
    for page in pages() {
        // `<!-- other TOML -->` before a block says that it is no configuration of tidegate, `<!-- part -->` that it
        // shows a part of one.
        let blocks = page.blocks().into_iter();
        let ours = blocks.filter(|block| block.language == "toml" && !block.is_marked("other TOML"));
        checked.extend(
            ours.map(|block| (format!("{}:{}", page.name, block.line), !block.is_marked("part"), block.text)),
        );
    }
    assert!(checked.len() > 10, "{checked:?}");
    for (place, is_complete, text) in checked {
        let loaded = parse(&place, &text).unwrap_or_else(|findings| panic!("{}\n{text}", lines(&findings)));
        if is_complete {
            assert!(still_missing(&loaded, None).is_empty(), "{place}: incomplete\n{text}");
            assert_eq!(loaded.warnings, [], "{place}\n{text}");
        }
    }
}

#[test]
fn generated_files_are_up_to_date() {
    let folder = project().join("docs/guide");
    for (name, generated) in [("configuration.md", reference::page()), ("tidegate.schema.json", schema())] {
        let path = folder.join(name);
        if std::env::var_os("TIDEGATE_WRITE_REFERENCE").is_some() {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&path, generated).unwrap();
            continue;
        }
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            committed == generated,
            "{name} differs from the table of keys: run TIDEGATE_WRITE_REFERENCE=1 cargo nextest run -p tidegate \
             generated"
        );
    }
}
