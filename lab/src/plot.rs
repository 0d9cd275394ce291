//! Line plots in SVG: one shape for every figure, so that they read alike.

use std::ops::Range;

use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::prelude::*;

use crate::Error;
use crate::stats::Spread;

const SIZE: (u32, u32) = (800, 460);
/// Distinct for most people who see colours differently (Okabe and Ito).
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(90, 90, 90),
];

/// A plot with a line for each series.
#[derive(Clone, Debug)]
pub struct Plot {
    /// What is shown.
    pub title: String,
    /// Name and unit of the horizontal axis.
    pub x: String,
    /// Whether the horizontal axis is logarithmic.
    pub x_log: bool,
    /// Name and unit of the vertical axis, which starts at 0.
    pub y: String,
    /// The lines.
    pub series: Vec<Series>,
}

/// One line and the name in the legend.
#[derive(Clone, Debug)]
pub struct Series {
    /// As in the legend.
    pub name: String,
    /// In the order of the line.
    pub points: Vec<Point>,
}

/// A point and, where measured repeatedly, how far the measurements spread.
#[derive(Clone, Copy, Debug)]
pub struct Point {
    /// On the horizontal axis.
    pub x: f64,
    /// The median, and the bar from least to greatest.
    pub y: Spread,
}

impl Point {
    /// A point without a bar.
    pub fn exact(x: f64, y: f64) -> Self {
        Self { x, y: Spread { median: y, least: y, greatest: y } }
    }
}

impl Plot {
    /// The plot as an SVG document.
    ///
    /// # Errors
    /// When there is nothing to draw, or the drawing library refuses.
    pub fn svg(&self) -> Result<String, Error> {
        let mut svg = String::new();
        self.draw(&mut svg).map_err(|message| Error::Plot { name: self.title.clone(), message })?;
        Ok(svg)
    }

    fn draw(&self, svg: &mut String) -> Result<(), String> {
        let (x_range, y_range) = self.ranges().ok_or("there are no points")?;
        let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        area.fill(&WHITE).map_err(text)?;
        let legend = self.emptiest_corner(&x_range, &y_range);
        let axis = Axis { range: x_range, log: self.x_log };
        let mut chart = ChartBuilder::on(&area)
            .caption(&self.title, ("sans-serif", 20))
            .margin(14)
            .margin_right(28)
            .x_label_area_size(46)
            .y_label_area_size(84)
            .build_cartesian_2d(axis, y_range)
            .map_err(text)?;
        chart
            .configure_mesh()
            .x_desc(&self.x)
            .y_desc(&self.y)
            .y_label_formatter(&|value| label(*value))
            .label_style(("sans-serif", 13))
            .axis_desc_style(("sans-serif", 14))
            .light_line_style(WHITE)
            .bold_line_style(RGBColor(225, 225, 225))
            .draw()
            .map_err(text)?;
        for (series, colour) in self.series.iter().zip(COLOURS.iter().cycle()) {
            let line = series.points.iter().map(|point| (point.x, point.y.median));
            chart
                .draw_series(LineSeries::new(line, colour.stroke_width(2)))
                .map_err(text)?
                .label(&series.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
            let spread = |point: &&Point| point.y.least < point.y.greatest;
            let bars = series.points.iter().filter(spread).map(|point| {
                PathElement::new(
                    [(point.x, point.y.least), (point.x, point.y.greatest)],
                    colour.stroke_width(1),
                )
            });
            chart.draw_series(bars).map_err(text)?;
            // Marks where a point was measured; a curve of very many points is a line.
            if series.points.len() <= 24 {
                let marks = series
                    .points
                    .iter()
                    .map(|point| Circle::new((point.x, point.y.median), 3, colour.filled()));
                chart.draw_series(marks).map_err(text)?;
            }
        }
        chart
            .configure_series_labels()
            .position(legend)
            .background_style(WHITE.mix(0.85))
            .border_style(RGBColor(190, 190, 190))
            .label_font(("sans-serif", 14))
            .draw()
            .map_err(text)?;
        area.present().map_err(text)
    }

    /// Where the legend hides the fewest points.
    fn emptiest_corner(&self, x: &Range<f64>, y: &Range<f64>) -> SeriesLabelPosition {
        let corners = [
            (SeriesLabelPosition::LowerRight, true, false),
            (SeriesLabelPosition::UpperLeft, false, true),
            (SeriesLabelPosition::UpperRight, true, true),
            (SeriesLabelPosition::LowerLeft, false, false),
        ];
        let scale = |value: f64| if self.x_log { value.ln() } else { value };
        let hidden = |right: bool, upper: bool| {
            let points = self.series.iter().flat_map(|series| &series.points);
            let within = |point: &&Point| {
                let across = (scale(point.x) - scale(x.start)) / (scale(x.end) - scale(x.start));
                let up = (point.y.median - y.start) / (y.end - y.start);
                (if right { across > 0.6 } else { across < 0.4 }) && (if upper { up > 0.7 } else { up < 0.3 })
            };
            points.filter(within).count()
        };
        let [first, ..] = corners.clone();
        corners.into_iter().min_by_key(|(_, right, upper)| hidden(*right, *upper)).unwrap_or(first).0
    }

    /// What the axes must hold; `None` without finite points.
    fn ranges(&self) -> Option<(Range<f64>, Range<f64>)> {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let finite = points().all(|point| point.x.is_finite() && point.y.greatest.is_finite());
        let least = points().map(|point| point.x).reduce(f64::min)?;
        let greatest = points().map(|point| point.x).reduce(f64::max)?;
        let top = points().map(|point| point.y.greatest).reduce(f64::max)?;
        if !finite || (self.x_log && least <= 0.0) {
            return None;
        }
        let x = if self.x_log { least / 1.15..greatest * 1.15 } else { 0.0..greatest.max(f64::MIN_POSITIVE) };
        Some((x, 0.0..(top * 1.05).max(f64::MIN_POSITIVE)))
    }
}

/// The horizontal axis. The library's own logarithmic axis marks decades alone, too few for one that spans three.
struct Axis {
    range: Range<f64>,
    log: bool,
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let scale = |value: f64| if self.log { value.ln() } else { value };
        let (start, end) = (scale(self.range.start), scale(self.range.end));
        let share = (scale(*value) - start) / (end - start);
        // Within the drawing's few hundred pixels.
        limit.0 + (f64::from(limit.1 - limit.0) * share).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if !self.log {
            let axis: plotters::coord::types::RangedCoordf64 = self.range.clone().into();
            return axis.key_points(hint);
        }
        let decades = self.range.start.log10().floor() as i32..=self.range.end.log10().ceil() as i32;
        decades
            .flat_map(|decade| [1.0, 2.0, 5.0].map(|step| step * 10f64.powi(decade)))
            .filter(|point| self.range.contains(point))
            .collect()
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

impl ValueFormatter<f64> for Axis {
    fn format(value: &f64) -> String {
        label(*value)
    }
}

/// Thousands set apart; digits after the point for small numbers only.
fn label(value: f64) -> String {
    if value.abs() >= 10.0 || value == 0.0 {
        // Axis labels are rounded on purpose.
        crate::table::thousands(value.round().abs() as u64)
    } else {
        let text = format!("{value:.3}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(points: Vec<Point>) -> Plot {
        Plot {
            title: "requests & connections".into(),
            x: "connections".into(),
            x_log: true,
            y: "requests/s".into(),
            series: vec![Series { name: "bare <epoll>".into(), points }],
        }
    }

    #[test]
    fn a_plot_names_its_title_axes_and_series_and_escapes_them() {
        let svg = plot(vec![Point::exact(32.0, 100_000.0), Point::exact(20_000.0, 60_000.0)]).svg().unwrap();
        assert!(svg.trim_start().starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        for expected in
            ["requests &amp; connections", "bare &lt;epoll&gt;", "requests/s", "20,000", "100,000"]
        {
            assert!(svg.contains(expected), "no {expected} in {svg}");
        }
    }

    #[test]
    fn a_point_measured_repeatedly_has_a_bar() {
        // The second point keeps the vertical axis the same.
        let lines = |y| {
            let svg = plot(vec![Point { x: 32.0, y }, Point::exact(64.0, 3.0)]).svg().unwrap();
            svg.matches("<polyline").count()
        };
        let once = Spread { median: 2.0, least: 2.0, greatest: 2.0 };
        let repeatedly = Spread { median: 2.0, least: 1.0, greatest: 3.0 };
        assert_eq!(lines(repeatedly), lines(once) + 1);
    }

    #[test]
    fn nothing_to_draw_is_an_error() {
        assert!(plot(Vec::new()).svg().is_err());
        assert!(plot(vec![Point::exact(f64::NAN, 1.0)]).svg().is_err());
        assert!(plot(vec![Point::exact(0.0, 1.0)]).svg().is_err(), "0 has no logarithm");
    }

    #[test]
    fn the_same_figures_give_the_same_document() {
        let make = || plot(vec![Point::exact(32.0, 5.0), Point::exact(64.0, 7.0)]).svg().unwrap();
        assert_eq!(make(), make());
    }
}
