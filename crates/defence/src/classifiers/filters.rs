//! Requests that are refused by what they look like: rules across layers, such as this prefix with this User-Agent.

use tidegate_core::hooks::{Classifier, Decision, Field, RequestLine, RequestView, Scene};
use tidegate_core::{Reason, Visit};

use super::verdict;
use crate::Settings;
use crate::settings::Filter;

#[derive(Debug)]
pub(super) struct Filters {
    filters: Vec<(Filter, Decision)>,
    folds_case: bool,
    name: &'static str,
}

/// The name under which filters that are only tried out go.
pub(crate) const TRIED_OUT: &str = "form-tried-out";

impl Filters {
    /// Those that act, or those that are only tried out.
    pub(super) fn new(settings: &Settings, dry_run: bool) -> Self {
        let with_decision = |(number, filter): (u16, &Filter)| {
            let decision = Decision::new(verdict(filter.action, settings), Reason::Form);
            (filter.clone(), Decision { filter: number, ..decision })
        };
        let chosen = (1..).zip(&settings.filters).filter(|(_, filter)| filter.dry_run == dry_run);
        let name = if dry_run { TRIED_OUT } else { Reason::Form.name() };
        Self { filters: chosen.map(with_decision).collect(), folds_case: settings.folds_case, name }
    }
}

impl Classifier for Filters {
    fn name(&self) -> &'static str {
        self.name
    }

    fn looks_at_lines(&self) -> bool {
        self.filters.iter().any(|(filter, _)| is_about_the_line(filter))
    }

    /// A method that is not wanted is refused before the rest of the head is waited for.
    fn on_request_line(&self, scene: &mut Scene<'_>, line: &RequestLine<'_>) -> Decision {
        let mut filters = self.filters.iter().filter(|(filter, _)| is_about_the_line(filter));
        let found = filters.find(|(filter, _)| {
            comes_from(filter, scene) && filter.methods.iter().any(|method| method.as_bytes() == line.method)
        });
        found.map_or(Decision::CONTINUE, |(_, decision)| *decision)
    }

    fn on_request(&self, scene: &mut Scene<'_>, request: &RequestView<'_>, _: &Visit) -> Decision {
        let found = self.filters.iter().find(|(filter, _)| self.matches(filter, scene, request));
        found.map_or(Decision::CONTINUE, |(_, decision)| *decision)
    }
}

/// Whether the first line tells all that the filter asks for.
fn is_about_the_line(filter: &Filter) -> bool {
    let others = [&filter.path, &filter.user_agent, &filter.content_type];
    !filter.methods.is_empty() && others.iter().all(|part| part.is_empty())
}

fn comes_from(filter: &Filter, scene: &Scene<'_>) -> bool {
    filter.source.is_none_or(|source| source.contains(scene.peer.address))
}

impl Filters {
    fn matches(&self, filter: &Filter, scene: &Scene<'_>, request: &RequestView<'_>) -> bool {
        let field = |field| request.field(field).unwrap_or_default();
        let begins = |path: &[u8]| match self.folds_case {
            true => starts(path, &filter.path),
            false => path.starts_with(filter.path.as_bytes()),
        };
        comes_from(filter, scene)
            && (filter.methods.is_empty()
                || filter.methods.iter().any(|method| method.as_bytes() == request.method))
            && (begins(request.path) || request.reading.is_some_and(begins))
            && contains(field(Field::UserAgent), &filter.user_agent)
            && starts(field(Field::ContentType), &filter.content_type)
    }
}

/// Without regard to case; everything contains nothing.
pub(crate) fn contains(text: &[u8], part: &str) -> bool {
    part.is_empty() || text.windows(part.len()).any(|window| window.eq_ignore_ascii_case(part.as_bytes()))
}

fn starts(text: &[u8], part: &str) -> bool {
    text.get(..part.len()).is_some_and(|start| start.eq_ignore_ascii_case(part.as_bytes()))
}
