//! Samplers that are elsewhere: what must be given together, and what not.

use super::RecipeError;
use super::check::Checker;
use super::keys::Recipe;

impl Checker<'_> {
    /// Checks who samples.
    pub(super) fn samplers(&self, recipe: &Recipe) -> Result<(), RecipeError> {
        let Some(samplers) = &recipe.cluster.samplers else { return Ok(()) };
        let keys = samplers.servers();
        let key = |name: &str| format!("cluster.samplers.{name}");
        let has_urls = !keys.urls.is_empty() || !keys.urls_file.as_os_str().is_empty();
        self.check(
            keys.start != has_urls,
            key("start"),
            keys.start,
            "true (the run starts the servers), or `urls` or `urls_file` given (they run already), and not both",
        )?;
        for (i, url) in keys.urls.iter().enumerate() {
            let is_http = ["http://", "https://"].iter().any(|scheme| url.starts_with(scheme));
            let range = "an address with http:// or https://, without a user, and given once";
            let once = !keys.urls[..i].contains(url);
            // One that is refused may hold a password.
            let shown =
                if url.contains('@') { "an address with a user".into() } else { format!("\"{url}\"") };
            self.check(is_http && once && !url.contains('@'), key(&format!("urls.{i}")), shown, range)?;
        }
        self.at_least_one(key("count"), keys.count)?;
        self.check(!keys.python.as_os_str().is_empty(), key("python"), "empty", "a program or its path")?;
        let tolerance = keys.tolerance;
        self.check(
            tolerance > 0.0 && tolerance.is_finite(),
            key("tolerance"),
            tolerance,
            "finite and more than 0",
        )?;
        self.seconds(&key("start_seconds"), keys.start_seconds)?;
        self.seconds(&key("adopt_seconds"), keys.adopt_seconds)?;
        self.seconds(&key("silent_seconds"), keys.silent_seconds)?;
        self.seconds(&key("answer_seconds"), keys.answer_seconds)?;
        let trained = recipe.policies().into_iter().filter(|(_, keys)| keys.is_trained()).count();
        self.check(
            trained == 1,
            "cluster.samplers",
            format!("given, and {trained} policies are trained"),
            "left out unless the recipe trains one policy: servers sample for one",
        )
    }
}
