//! What the scenarios of the Tempesta paper have in common.

use crate::Paper;

pub(super) static PAPER: Paper = Paper {
    name: "tempesta",
    title: "Tempesta: HTTP acceleration and DDoS mitigation (its §5)",
    setting: "The paper's servers had ten cores, a 10 Gbit/s link and their work inside the kernel. Here the server is \
              pinned to one core and the load to another, joined by the loopback interface, and every server is a \
              process of an unpatched kernel. So absolute figures are not comparable; what is compared is tidegate \
              with servers measured in the same run. The bare epoll server waits, reads and writes the same bytes \
              again, without a parser or a limit: what a process can reach at best. tidegate runs with one data core \
              and its default protections; its limit on connections is raised, and the load is exempt from what the \
              defence decides, which still counts and judges every request.\n\n\
              In each round every server is measured once, in an order that rotates. Tables give the median of the \
              rounds, and least to greatest in brackets; ratios are medians of the rounds' ratios. Server CPU is the \
              server's user and system time; it decides, because it does not depend on which of the two cores is full.",
};

/// At most 15 % behind the bare epoll server.
pub(super) const BEHIND_BARE: f64 = 0.85;
