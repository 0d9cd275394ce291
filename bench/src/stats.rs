//! Statistics of a few repeated measurements.

/// Median, least and greatest of repeated measurements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// The middle one; the mean of the two middle ones of an even number.
    pub median: f64,
    /// The least.
    pub least: f64,
    /// The greatest.
    pub greatest: f64,
}

impl Spread {
    /// `None` without measurements.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (least, greatest) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median =
            if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 };
        Some(Self { median, least, greatest })
    }

    /// `median (least–greatest)` with `digits` after the point.
    pub fn text(&self, digits: usize) -> String {
        format!("{:.digits$} ({:.digits$}–{:.digits$})", self.median, self.least, self.greatest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_an_odd_number_the_middle_one_is_the_median() {
        let spread = Spread::of([3.0, 1.0, 2.0]).unwrap();
        assert_eq!(spread, Spread { median: 2.0, least: 1.0, greatest: 3.0 });
        assert_eq!(spread.text(1), "2.0 (1.0–3.0)");
    }

    #[test]
    fn of_an_even_number_the_mean_of_the_middle_ones_is_the_median() {
        assert_eq!(Spread::of([4.0, 1.0, 2.0, 3.0]).unwrap().median, 2.5);
    }

    #[test]
    fn without_measurements_there_is_no_spread() {
        assert_eq!(Spread::of([]), None);
    }
}
