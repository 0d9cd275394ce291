//! The scenarios, one file each, and what those of one kind share.

mod cc;
pub mod cc_attack;
mod cc_beck;
mod cc_fig10;
mod cc_fig11;
mod cc_fig12;
mod cc_fig4;
mod cc_fig6;
mod cc_fig8;
mod cc_fig9;
pub mod cc_hop;
mod cc_kill;
mod cc_load;
mod cc_servers;
mod cc_table1;
mod defence;
mod defence_attacks;
mod defence_costs;
mod defence_crowd;
mod defence_origin;
mod defence_surge;
mod dhttp;
mod dhttp_bound;
mod dhttp_connections;
mod dhttp_fig10;
mod dhttp_fig13;
mod dhttp_fig14;
mod dhttp_fig3;
mod dhttp_fig4;
mod dhttp_fig6;
mod dhttp_http3;
mod dhttp_loss;
mod dhttp_peak;
mod dhttp_site;
mod dhttp_users;
mod ksd;
mod ksd_blocks;
mod ksd_fig10;
mod ksd_fig11;
mod ksd_fig12;
mod ksd_fig5;
mod ksd_fig6;
mod ksd_fig7;
mod ksd_flood;
mod ksd_tables_3_4;
mod ksd_tables_5_6;
mod parsers;
mod sweep;
mod tempesta;
mod tempesta_fig3;
mod tempesta_fig4;
mod tempesta_fig5;
mod tempesta_fig6;
mod tempesta_fig7;
mod trickles;
mod trickles_fig10;
mod trickles_fig11;
mod trickles_fig12;
mod trickles_fig13;
mod trickles_fig14;
mod trickles_fig15;
mod trickles_fig16;
mod trickles_fig17;
mod trickles_fig9;
mod trickles_forged;
mod trickles_simulation;

use crate::{Error, Scenario};

/// Every scenario, in the order of `list` and of the pages.
pub const ALL: &[&Scenario] = &[
    &tempesta_fig3::SCENARIO,
    &tempesta_fig4::SCENARIO,
    &tempesta_fig5::SCENARIO,
    &tempesta_fig6::SCENARIO,
    &tempesta_fig7::SCENARIO,
    &ksd_fig5::SCENARIO,
    &ksd_fig6::SCENARIO,
    &ksd_fig7::SCENARIO,
    &ksd_fig10::SCENARIO,
    &ksd_tables_3_4::SCENARIO,
    &ksd_fig11::SCENARIO,
    &ksd_tables_5_6::SCENARIO,
    &ksd_fig12::SCENARIO,
    &ksd_flood::SCENARIO,
    &ksd_blocks::SCENARIO,
    &trickles_fig9::SCENARIO,
    &trickles_fig10::SCENARIO,
    &trickles_fig11::SCENARIO,
    &trickles_fig12::SCENARIO,
    &trickles_fig13::SCENARIO,
    &trickles_fig14::SCENARIO,
    &trickles_fig15::SCENARIO,
    &trickles_fig16::SCENARIO,
    &trickles_fig17::SCENARIO,
    &trickles_forged::SCENARIO,
    &dhttp_fig3::SCENARIO,
    &dhttp_fig4::SCENARIO,
    &dhttp_fig6::FIG6,
    &dhttp_fig6::FIG7,
    &dhttp_fig6::FIG8,
    &dhttp_fig6::FIG9,
    &dhttp_fig10::SCENARIO,
    &dhttp_fig13::SCENARIO,
    &dhttp_fig14::SCENARIO,
    &dhttp_peak::SCENARIO,
    &dhttp_http3::SCENARIO,
    &dhttp_loss::SCENARIO,
    &cc_fig4::SCENARIO,
    &cc_fig6::SCENARIO,
    &cc_fig8::SCENARIO,
    &cc_fig9::SCENARIO,
    &cc_fig10::SCENARIO,
    &cc_fig11::SCENARIO,
    &cc_fig12::SCENARIO,
    &cc_beck::SCENARIO,
    &cc_table1::SCENARIO,
    &cc_kill::SCENARIO,
    &defence_attacks::FLOOD,
    &defence_attacks::MANY,
    &defence_attacks::HEADS,
    &defence_attacks::BODIES,
    &defence_attacks::READERS,
    &defence_attacks::PROGRAMS,
    &defence_attacks::PULSES,
    &defence_attacks::RANDOM,
    &defence_attacks::COSTLY,
    &defence_attacks::NEIGHBOURS,
    &defence_attacks::FORGED,
    &defence_crowd::SCENARIO,
    &defence_surge::SCENARIO,
    &defence_costs::OVERHEAD,
    &defence_costs::MEMORY,
];

/// The scenarios of these names or of the papers of these names, each once, in the order of [`ALL`]; `all` is every
/// one.
///
/// # Errors
/// [`Error::Usage`] with the nearest name, if there is no such name.
pub fn choose(names: &[String]) -> Result<Vec<&'static Scenario>, Error> {
    let named = |scenario: &Scenario, name: &str| {
        name == "all" || scenario.name == name || scenario.paper.name == name
    };
    for name in names {
        if !ALL.iter().any(|scenario| named(scenario, name)) {
            return Err(Error::Usage(unknown(name)));
        }
    }
    let chosen = |scenario: &&&Scenario| names.iter().any(|name| named(scenario, name));
    Ok(ALL.iter().filter(chosen).copied().collect())
}

fn unknown(name: &str) -> String {
    let nearest = ALL
        .iter()
        .map(|scenario| (strsim::damerau_levenshtein(scenario.name, name), scenario.name))
        .min()
        .filter(|(distance, _)| *distance <= 4);
    let hint = nearest.map_or(String::new(), |(_, nearest)| format!("; did you mean {nearest}?"));
    format!("there is no scenario {name}{hint} (tidegate-lab list shows them all)")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(chosen: &[&str]) -> Result<Vec<&'static str>, Error> {
        let chosen: Vec<String> = chosen.iter().map(|name| (*name).to_owned()).collect();
        Ok(choose(&chosen)?.iter().map(|scenario| scenario.name).collect())
    }

    #[test]
    fn names_are_unique_begin_with_their_paper_and_claim_in_one_line() {
        for scenario in ALL {
            let same = ALL.iter().filter(|other| other.name == scenario.name).count();
            assert_eq!(same, 1, "{}", scenario.name);
            assert!(scenario.name.starts_with(&format!("{}-", scenario.paper.name)), "{}", scenario.name);
            assert!(!scenario.claim.contains('\n') && !scenario.claim.ends_with('.'), "{}", scenario.claim);
        }
    }

    #[test]
    fn a_scenario_named_twice_is_run_once() {
        let chosen = names(&["tempesta-fig5", "tempesta", "tempesta-fig5"]).unwrap();
        assert_eq!(chosen.iter().filter(|name| **name == "tempesta-fig5").count(), 1);
        assert!(chosen.contains(&"tempesta-fig3"));
        assert_eq!(names(&["all"]).unwrap().len(), ALL.len());
    }

    #[test]
    fn a_name_that_is_nearly_right_is_bad_usage_with_a_suggestion() {
        let error = names(&["tempesta-fig55"]).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("did you mean tempesta-fig5?"), "{error}");
        assert!(!names(&["something-else"]).unwrap_err().to_string().contains("did you mean"));
    }
}
