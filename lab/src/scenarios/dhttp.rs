//! What the scenarios of the DHTTP paper have in common.

use crate::Paper;

pub(super) static PAPER: Paper = Paper {
    name: "dhttp",
    title: "DHTTP: An Efficient and Cache-Friendly Transfer Protocol for the Web (its §VI)",
    setting: "The paper's server was a modified Apache on a processor of 500 MHz, its clients SURGE on five \
              workstations. Here server and clients are on one machine. Where the network is the subject, hosts are \
              network namespaces and links are emulated in user space; where the server is, it is pinned to one core \
              and the load to another. Absolute figures are not comparable with the paper's; what is compared ran in \
              the same run.",
};
