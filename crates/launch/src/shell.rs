//! Quotes words of shell commands, and runs commands of launchers.

use std::time::Duration;

use levade_run::unusable;

/// Quotes a word so that a shell reads it unchanged. Words without special characters are not
/// quoted.
pub fn quoted(word: &impl ToString) -> String {
    let word = word.to_string();
    if !word.is_empty()
        && word.chars().all(|c| c.is_ascii_alphanumeric() || "._-/=+:,@%".contains(c))
    {
        word
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// Runs a command of a launcher, and returns the command's standard output.
///
/// # Errors
/// Returns an error if the command cannot be started, does not finish within 120 s, or fails. If
/// the command fails, the error contains its standard error.
pub async fn run_command(words: &[&str]) -> anyhow::Result<String> {
    const TIMEOUT: Duration = Duration::from_secs(120);
    let command = words.join(" ");
    let run = tokio::process::Command::new(words[0]).args(&words[1..]).kill_on_drop(true).output();
    let output = tokio::time::timeout(TIMEOUT, run).await;
    let output =
        output.map_err(|_| anyhow::anyhow!("`{command}` did not finish within {TIMEOUT:?}"))?;
    let output = output.map_err(|error| {
        unusable(format!("cannot start {}: {error}; is it installed on this machine?", words[0]))
    })?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        anyhow::bail!("`{command}` failed ({}): {}", output.status, errors.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_escapes_spaces_quotes_and_variables() {
        assert_eq!(quoted(&"/runs/a-1"), "/runs/a-1");
        assert_eq!(quoted(&"it's a $HOME"), r"'it'\''s a $HOME'");
    }
}
