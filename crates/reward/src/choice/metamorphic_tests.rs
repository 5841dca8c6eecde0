//! Generates texts that state options among other sentences. No wrong option may be found, and
//! nearly all of the right ones must be.

use super::ChoiceOptions;
use super::named::find_named_option;

/// Options of the generated questions. Models may also use their texts as ordinary words.
fn options() -> ChoiceOptions {
    let texts = ["11 cm", "cheesecake", "-84", "Paris"].map(str::to_owned);
    ChoiceOptions { texts: texts.into(), ..ChoiceOptions::default() }
}

/// Sentences in which models state an option. `@` is replaced by its letter.
const STATED: [&str; 96] = [
    "Answer: @",
    "Answer: @.",
    "**Answer:** @",
    "**Answer: @**",
    "Answer: **@**",
    "Answer - @",
    "answer=@",
    "Final Answer: @",
    "Final answer: (@)",
    "### Answer: @",
    "The answer is @",
    "The answer is @.",
    "The answer is (@).",
    "The answer is **@**.",
    "The answer is @!",
    "The answer is @?",
    "The answer is @;",
    "The answer is “@”.",
    "The answer is \"@\".",
    "The answer is '@'.",
    "The answer is `@`.",
    "The answer is {@}",
    "The answer is [@].",
    "The answer is <b>@</b>",
    "The answer is \\text{@}.",
    "The answer is $@$.",
    "The answer is \\(@\\).",
    "The answer is @\\.",
    "The answer is \\boxed{@}.",
    "The answer is: @",
    "The correct answer is: **@**",
    "The answer is option @.",
    "The correct option is @.",
    "The best choice is @.",
    "The right letter is @",
    "The answer should be @.",
    "The answer would be @.",
    "The answer must be @.",
    "The answer has to be @.",
    "The answer is therefore @.",
    "The answer to this question is @.",
    "I think that a good choice here is @",
    "I choose @.",
    "I'd choose (@).",
    "I would choose option @.",
    "I'd say option @",
    "I’d say @.",
    "I'll go with @.",
    "I would go with option @.",
    "I pick @!",
    "I select @.",
    "My choice is @.",
    "My answer: @",
    "So it is (@).",
    "So it's @.",
    "Therefore, @ is correct.",
    "@ is correct.",
    "Option @ is correct.",
    "(@) is the correct answer.",
    "**@** is the right choice.",
    "@ is the best answer.",
    "Thus option @ is right.",
    "Hence, the answer is @.",
    "Therefore, option @.",
    "Choose @.",
    "This matches option @.",
    "It corresponds to choice (@).",
    "The answer is @ because nothing else fits.",
    "The answer is @, since nothing else fits.",
    "The answer is @ - it fits.",
    "{\"answer\": \"@\"}",
    "```json\n{\"reasoning\": \"It fits.\", \"answer\": \"@\"}\n```",
    "{'answer': '@'}",
    "<answer>@</answer>",
    "<answer>\n(@)\n</answer>",
    "\\boxed{@}",
    "$\\boxed{\\text{@}}$",
    "\\boxed{\\text{(@)}}",
    "@",
    "(@)",
    "**@**",
    "@.",
    "Answer：@",
    "The answer is（@）.",
    "Answer @",
    "Answer: @ (see above)",
    "That leaves @.",
    "It can only be @, so the answer is @.",
    "Answer: Option @",
    "The answer is choice @.",
    "Correct answer: @",
    "Correct option: (@)",
    "The answer is @ as shown.",
    "Answer:\n@",
    "Answer:\n\n**@**",
    "It must be @.",
];

/// The same in other languages.
const ELSEWHERE: [&str; 60] = [
    "الإجابة: @",
    "الإجابة الصحيحة هي @.",
    "الجواب: @",
    "الإجابة هي (@)",
    "الجواب الصحيح هو @",
    "উত্তর: @",
    "সঠিক উত্তর: @",
    "উত্তর হল @।",
    "সঠিক উত্তর হলো @",
    "Antwort: @",
    "Die Antwort ist @.",
    "Die richtige Antwort ist @.",
    "Die Antwort lautet: @",
    "Die richtige Antwort lautet (@).",
    "Respuesta: @",
    "La respuesta es @.",
    "La respuesta correcta es @.",
    "La respuesta correcta es la @.",
    "La respuesta correcta es la opción @.",
    "Réponse : @",
    "Réponse: **@**",
    "La réponse est @.",
    "La bonne réponse est @.",
    "La réponse correcte est la @.",
    "उत्तर: @",
    "सही उत्तर @ है।",
    "सही उत्तर: (@)",
    "जवाब: @",
    "Jawaban: @",
    "Jawabannya adalah @.",
    "Jawaban yang benar adalah @.",
    "Jawaban: (@)",
    "Risposta: @",
    "La risposta è @.",
    "La risposta corretta è @.",
    "La risposta corretta è la @.",
    "答え: @",
    "答えは@です。",
    "正解は@です",
    "答えは「@」です。",
    "答え：@",
    "정답: @",
    "정답은 @입니다.",
    "답: @",
    "답은 @입니다",
    "Resposta: @",
    "A resposta é @.",
    "A resposta correta é @.",
    "A resposta correta é a opção @.",
    "A alternativa correta é @.",
    "Jibu: @",
    "Jibu sahihi ni @.",
    "Jibu ni @.",
    "Ìdáhùn: @",
    "Idahun: @",
    "Ìdáhùn náà ni @.",
    "答案：@",
    "正确答案是 @。",
    "答案是@",
    "Правильный ответ: @",
];

/// Sentences with `@` that do not state an option.
const UNSTATED: [&str; 84] = [
    "The answer is not @.",
    "The answer isn't @.",
    "The answer cannot be @.",
    "The answer is neither @ nor any other.",
    "@ is wrong.",
    "@ is not correct.",
    "@ is incorrect.",
    "Option @ is not the answer.",
    "(@) is too small.",
    "Not @.",
    "It is not (@).",
    "I would not choose @.",
    "I don't think the answer is @.",
    "I wouldn't say @.",
    "If the answer is @, then nothing fits.",
    "Suppose the answer is @.",
    "Whether the answer is @ is unclear.",
    "If @ is correct, nothing fits.",
    "The wrong answer is @.",
    "The incorrect option is @.",
    "A tempting answer is @",
    "A common wrong choice is @.",
    "The answer might be @.",
    "The answer could be @.",
    "@ or none of them",
    "@ and # are both right",
    "The answer is @ or #.",
    "The answer is @ and #.",
    "The answer is @/#.",
    "The answer is @, #.",
    "The answer is (@) or (#).",
    "Either @ or #.",
    "@ or #",
    "@, #",
    "@/#",
    "@ & #",
    "Answer: @ or #",
    "Answer: @, #",
    "\\boxed{@, #}",
    "\\boxed{@ or #}",
    "<answer>@ or #</answer>",
    "Neither @ nor # is correct.",
    "@ or # is correct.",
    "I choose @ or #.",
    "None of the above",
    "None",
    "I don't know.",
    "Don't know",
    "Does it matter?",
    "All of the above",
    "A dog barks.",
    "Answer: A dog",
    "Bad question",
    "Cannot be determined",
    "The unit is D.",
    "Answer: unknown",
    "Answer: none",
    "\\boxed{42}",
    "\\boxed{x+1}",
    "\\boxed{@_2}",
    "\\boxed{@^2}",
    "\\boxed{@'}",
    "\\boxed{@ = 5}",
    "\\boxed{@+1}",
    "<answer>42</answer>",
    "The answer is 42.",
    "The answer is @-84.",
    "The answer is @x.",
    "Antwort: nicht @",
    "Die Antwort ist nicht @.",
    "La respuesta no es @.",
    "La réponse n'est pas @.",
    "Jawabannya bukan @.",
    "La risposta non è @.",
    "A resposta não é @.",
    "答案不是@。",
    "答えは@ではありません。",
    "정답은 @가 아닙니다.",
    "उत्तर @ नहीं है।",
    "Jibu si @.",
    "Wenn die Antwort @ ist, passt nichts.",
    "La respuesta incorrecta es @.",
    "错误答案是@。",
    "Ответ не @.",
];

/// Sentences that do not state anything.
const FILLER_SENTENCES: [&str; 16] = [
    "Let us compute each value.",
    "A is too small.",
    "It cannot be A, since the sum is odd.",
    "Option C is not correct.",
    "None of the others fits.",
    "If B were right, the sum would be odd.",
    "We get x = 42.",
    "\\boxed{42} is the energy.",
    "(The unit does not matter.)",
    "Vitamin D and vitamin C differ.",
    "A dog is no cat.",
    "I is the current.",
    "The options differ in their sign.",
    "Compare A and B first.",
    "Explanation: B is too large.",
    "The value of C is 5.",
];

/// Returns the letter of the option that a text names.
fn named_letter(text: &str) -> Option<char> {
    let (number, _) = find_named_option(text, 4, &options())?;
    "ABCD".chars().nth(number)
}

#[test]
fn stated_option_is_found_among_sentences() {
    let mut count = 0;
    let mut lost = 0;
    let mut wrong = 0;
    for template in STATED.iter().chain(&ELSEWHERE) {
        for letter in "ABCD".chars() {
            let stated = template.replace('@', &letter.to_string());
            let mut texts = vec![stated.clone()];
            for (number, sentence) in FILLER_SENTENCES.iter().enumerate() {
                texts.push(format!("{sentence}\n{stated}"));
                texts.push(format!(
                    "{sentence}\n\n{stated}\n\n{}",
                    FILLER_SENTENCES[(number + 5) % FILLER_SENTENCES.len()]
                ));
            }
            for text in texts {
                count += 1;
                match named_letter(&text) {
                    Some(found) if found == letter => {}
                    None => {
                        lost += 1;
                        println!("lost: {text:?}");
                    }
                    Some(found) => {
                        wrong += 1;
                        println!("FALSE: {text:?} gave {found}");
                    }
                }
            }
        }
    }
    println!("choice: {count} with an option, {lost} lost, {wrong} false");
    assert!(count >= 10_000 && wrong == 0 && lost * 50 <= count);
}

#[test]
fn unstated_option_is_not_found() {
    let mut count = 0;
    let mut wrong = 0;
    for template in UNSTATED {
        for (letter, other) in
            [('A', 'B'), ('B', 'C'), ('C', 'D'), ('D', 'A'), ('B', 'A'), ('D', 'C')]
        {
            let text = template.replace('@', &letter.to_string()).replace('#', &other.to_string());
            let mut texts = vec![text.clone()];
            for sentence in FILLER_SENTENCES {
                texts.push(format!("{sentence}\n{text}"));
                texts.push(format!("{text}\n\n{sentence}"));
            }
            for text in texts {
                count += 1;
                if let Some(found) = named_letter(&text) {
                    wrong += 1;
                    println!("FALSE: {text:?} gave {found}");
                }
            }
        }
    }
    println!("choice: {count} without an option, {wrong} false");
    assert!(count >= 10_000 && wrong == 0);
}

#[test]
fn later_choice_replaces_earlier_but_denial_does_not() {
    let mut count = 0;
    let mut lost = 0;
    for first in STATED.iter().chain(&ELSEWHERE) {
        let is_short = first.starts_with(['@', '(', '\\', '<']) || first.contains("\\boxed");
        for (before, after) in
            [("Answer: C", ""), ("", "The answer is not D."), ("I choose A. Wait.", "D is wrong.")]
        {
            let text = format!("{before}\n\n{}\n\n{after}", first.replace('@', "B"));
            count += 1;
            match named_letter(&text) {
                Some('B') => {}
                // A bare letter or a box is not a sentence, so the preceding statement counts.
                _ if is_short => {}
                None => {
                    lost += 1;
                    println!("lost: {text:?}");
                }
                Some(other) => panic!("{text:?} gave {other}"),
            }
        }
    }
    println!("choice: {count} of several statements, {lost} lost");
    assert!(lost * 50 <= count);
}
